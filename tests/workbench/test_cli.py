"""The command line itself: stops, gone readers, odd words and mistakes end in a line.

What happens before a command begins, or to its streams, is found nowhere else.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fairseq_posenc import locks, registry
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import lock_folder, whole_folder
from fairseq_posenc.workbench import cli, preprocessing
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from tests.helpers.commands import call, refused
from tests.helpers.preprocess import start
from tests.helpers.products import WHOLE
from tests.helpers.tiny_models import COMPANIONS, NAMES


@pytest.mark.parametrize("where", ["add_arguments", "run"])
def test_ctrl_c_is_one_line_before_and_in_a_command(where, monkeypatch, capsys):
    """Most of the seconds before a command begins are imports, which its options need."""
    monkeypatch.setattr(cli.Command, "add_arguments", lambda *_: None)
    monkeypatch.setattr(cli.Command, where, lambda *_: signal.raise_signal(signal.SIGTERM))
    message = "fairseq-posenc: stopped; the same command continues, or starts again\n"
    assert call(capsys, "count", code=STOPPED) == ("", message)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError("it failed"), 1),
        (OSError("No space left on device (os error 28)"), 1),  # of Rust, without an errno
        (FileNotFoundError("not from a user"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mistakes_end_in_a_line_and_our_faults_in_a_trace(error, code, monkeypatch, capsys):
    """Alike where it is the cause of another, as fairseq wraps what goes wrong."""

    def fail(*_):
        raise RuntimeError("while loading") from error

    monkeypatch.setattr(cli.Command, "run", fail)
    with nullcontext() if code else pytest.raises(RuntimeError):
        refused(capsys, "list", code=code)


def shell(line, **variables):
    """Run a line in bash, where our command is known; return its exit code and what it says."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "", **variables}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=variables)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("stream", "number", "said"), [("stdout", 1, "end\n"), ("stderr", 2, "")])
def test_a_program_whose_reader_has_gone_ends_without_a_word_of_it(stream, number, said):
    code = f"""
import atexit, sys; atexit.register(print, "end", file=sys.stderr)
from fairseq_posenc.workbench.running.exit_codes import run_main
sys.exit(run_main(lambda: print("of no use to head", file=sys.{stream})))"""
    assert shell(f"exec 3> >(true); wait $!; python -c '{code}' {number}>&3") == (141, said)


def test_nohup_keeps_a_program_whose_terminal_closes():
    code = "import signal; from fairseq_posenc.workbench.running import exit_codes as ends; "
    code += "ends.run_main(lambda: signal.raise_signal(signal.SIGHUP))"
    assert shell(f"trap '' HUP; python -c '{code}'") == (0, "")


def test_an_output_that_cannot_be_written_is_a_line():
    code, message = shell("fairseq-posenc user-dir > /dev/full")  # written at the end
    assert code == 1
    assert re.fullmatch(r".* could not be written \(No space left on device\).*\n", message)


def test_a_deleted_working_folder_is_a_line(tmp_path):
    message = "fairseq-posenc: error: the working folder has been deleted; change to another one\n"
    assert shell(f"cd {tmp_path}; rmdir {tmp_path}; fairseq-posenc count rope") == (2, message)


def test_neither_a_dash_before_a_name_nor_the_environment_changes_a_command(tmp_path):
    line = f"cd {tmp_path}; fairseq-posenc plot table --encoding learned --out=-a.png"
    if WHOLE:  # compiles all of torch for PYTHONOPTIMIZE
        line = f"export PYTHONOPTIMIZE=2; {line} && fairseq-posenc describe rope"
    assert shell(line, MPLBACKEND="evil")[0] == 0
    assert os.listdir(tmp_path) == ["-a.png"]


ODD = {
    "half a character": (["describe", "caf\udce9"], "is not UTF-8"),
    "data": (["bleu", "--data", "a:b", "x=y"], "--data: 'a:b': fairseq splits names at ':'"),
    "out": (["compare", "--out", "a:b"], "--out: 'a:b': fairseq splits names at ':'"),
    "empty out": (["bleu", "a=b", "--out="], "--out: the name is empty; the current folder is ."),
    "empty model": (["translate", "--checkpoint", "", "x"], "--checkpoint: the name is empty"),
    "empty train": (["preprocess", "translation", "files", "--train="], "--train: the name is e"),
    "empty test": (["preprocess", "translation", "files", "--test", " "], "--test: the name is e"),
    "empty data": (["squad", "train", "--data", " "], "--data: the name is empty"),
    "empty place": (["preprocess", "plain_text", "--out", ""], "--out: the name is empty"),
    "empty text": (["preprocess", "chinese", "--out", "o", "--train="], "'' is not a file"),
    "lsit": (["lsit"], "there is no command 'lsit': did you mean list? "),
    "qqq": (["qqq"], "there is no command 'qqq': fairseq-posenc --help lists all"),
}


@pytest.mark.parametrize(("words", "message"), ODD.values(), ids=ODD)
def test_odd_arguments_are_refused_before_any_work(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)


def test_a_very_long_message_keeps_its_beginning_and_its_end():
    assert re.fullmatch("first .{,500} last", str(UserError(f"first{' word' * 9999} last")))


def test_each_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def lock_nothing(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", lock_nothing)
    with open(os.devnull) as elsewhere:  # on a file system of its own
        monkeypatch.setattr(locks, "_held", {elsewhere.fileno()})
        with lock_folder(tmp_path), whole_folder(tmp_path / "out") as out:
            write_whole(out / "text", "whole")
    assert capsys.readouterr().err.count("cannot be locked (Operation not supported)") == 1
    assert os.listdir(tmp_path / "out") == ["text"]


@pytest.mark.parametrize("words", ["--help", "user-dir"])
def test_what_needs_no_torch_starts_at_once(words):
    def seconds():
        return sum(os.times()[2:4])  # of programs that have ended

    before = seconds()
    assert shell(f"fairseq-posenc {words}")[0] == 0
    assert seconds() - before < 0.6  # a sixth of it where nothing else runs; torch takes 1.5


def test_the_list_has_every_encoding_and_companion(capsys):
    lines = call(capsys, "list")[0].splitlines()
    for name, line in zip(sorted([*NAMES, *COMPANIONS]), lines, strict=True):
        assert line.split()[:2] == [name, registry.get(name).acts_on]
        assert line.endswith(f"  {catalogue.parse_page(name)['summary'].replace('``', '')}")


COMPLETED = {"us": "user-dir", "count --max": "--max-positions", "preprocess pl": "plain_text"}


@pytest.mark.slow
@pytest.mark.parametrize("words", COMPLETED)
def test_a_shell_is_shown_how_words_go_on(words):
    line = f"fairseq-posenc {words}"
    typed = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    code, answer = shell("fairseq-posenc 8>&1", **typed)
    assert (code, answer.strip()) == (0, COMPLETED[words])


PROGRAMS = {x.stem: x.read_text("utf-8") for x in preprocessing.FOLDER.glob("*.py")}
HELPS = {  # each line of a help that names a command or a program ends with its description
    "--help": {name: command.help for name, command in cli.COMMANDS.items()},
    "preprocess --help": {x: text.split("\n")[0].lstrip('r"') for x, text in PROGRAMS.items()},
}


@pytest.mark.parametrize("words", HELPS)
def test_a_help_lists_every_name_once(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(words.split())
    out = capsys.readouterr().out
    for name, description in HELPS[words].items():
        assert re.findall(rf"(?m)^  {name} +(.*)$", out) == [description]


def test_preprocess_leaves_ctrl_c_as_it_was_if_a_program_cannot_be_imported():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ModuleNotFoundError):
        start("absent")
    assert signal.getsignal(signal.SIGINT) is before
