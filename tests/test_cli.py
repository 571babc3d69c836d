"""The command line itself: Ctrl-C, wherever a command is."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess

import pytest

from commands import run, script, sentences
from fairseq_posenc import cli, registry
from fairseq_posenc.analysis import catalogue, listing
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.running.interruption import STOPPED, any_end_like_ctrl_c


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("where", ["add_arguments", "run"])
def test_ctrl_c_is_one_line_in_every_command(name, where, monkeypatch, capsys):
    """Most of the seconds before a command begins are imports, which its options need."""
    monkeypatch.setattr(cli.Command, "add_arguments", lambda *_: None)
    monkeypatch.setattr(cli.Command, where, interrupted)
    assert cli.main([name]) == STOPPED
    assert capsys.readouterr() == ("", "fairseq-posenc: stopped\n")


def test_a_command_says_how_to_go_on(monkeypatch, capsys):
    def kill(*_):
        with any_end_like_ctrl_c("the same command continues"):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli.Command, "run", kill)
    assert cli.main(["list"]) == STOPPED
    assert capsys.readouterr().err == "fairseq-posenc: stopped; the same command continues\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("wrong"), 2),
        (RunError("it failed"), 1),
        (OSError(errno.ENOSPC, "no room", "file"), 1),
        (FileNotFoundError("what nobody told"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_command_ends_with(error, code, monkeypatch, capsys):
    """Alike where it is the cause of another, as fairseq wraps what goes wrong."""

    def fail(*_):
        raise RuntimeError("while loading") from error

    monkeypatch.setattr(cli.Command, "run", fail)
    if code is None:
        with pytest.raises(RuntimeError):
            cli.main(["list"])
    else:
        assert cli.main(["list"]) == code
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_training_that_fails_is_a_failed_run_and_no_mistake(tmp_path):
    training = ["fairseq-train", sentences(), "--task", "masked_lm", "--arch", "roberta", "--cpu"]
    training += ["--optimizer", "adam", "--max-tokens", 64, "--max-update", 9]
    training += ["--encoder-embed-dim", 10, "--encoder-attention-heads", 3]  # 3 heads of 10 / 3
    done = run("fairseq-posenc", "plan", "--", *training, cwd=tmp_path, fails=True)
    assert done.status == 1
    assert "fairseq-train failed with exit status 1" in done.err
    assert not done.out


@pytest.mark.parametrize("text", ["x" * 100_000, "a " * 50_000], ids=["a word", "many"])
@pytest.mark.parametrize(
    "command",
    [
        ["bleu"],
        ["compare", "--text"],
        ["curves"],
        ["glue", "--data", "x", "--protocol", "m4m", "--checkpoint"],
        ["init", "--arch", "roberta_m4m", "--out", "x", "--from"],
        ["lm-length", "--data", "x"],
        ["plan"],
        ["report"],
        ["translate", "--checkpoint"],
    ],
    ids=lambda words: words[0],
)
def test_endless_arguments_are_one_short_line(command, text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert cli.main([*command, text]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fairseq-posenc: error: ")
    assert told.count("\n") == 1
    assert len(told) < 1000


@pytest.mark.parametrize("words", [["--help"], ["user-dir"], ["list"]], ids=lambda words: words[0])
def test_what_needs_no_torch_starts_at_once(words):
    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    subprocess.run([script("fairseq-posenc"), *words], check=True, stdout=subprocess.DEVNULL)
    assert seconds() - before < 0.6  # a sixth of it where nothing else runs; torch takes 1.5


def test_the_list_says_what_the_modules_say():
    found = {entry.name: entry for entry in listing.entries()}
    assert list(found) == registry.names()
    for name, entry in found.items():
        assert entry.acts_on == registry.get(name).acts_on
        assert entry.summary == catalogue.page(name).summary


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fairseq-posenc us", {"user-dir"}),
        ("fairseq-posenc count --max", {"--max-positions"}),
        ("fairseq-posenc preprocess wiki", {"wikipedia", "wikitext"}),
    ],
)
def test_a_shell_is_told_how_words_go_on(line, found, tmp_path):
    answer = tmp_path / "answer"
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    shell.update({"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "IFS": "\n"})
    program = [script("fairseq-posenc")]
    subprocess.run(program, env={**os.environ, **shell}, check=True)
    assert {word.strip() for word in answer.read_text().split("\v")} == found


@pytest.mark.slow
def test_ctrl_c_in_doctor_is_one_line():
    with subprocess.Popen(
        [script("fairseq-posenc"), "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if line.startswith("backend reference"):
                break
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert process.returncode == STOPPED
    assert told == "fairseq-posenc: stopped\n"
