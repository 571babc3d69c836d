"""The command line itself: stops, gone readers, odd words and mistakes end in a line.

What happens before a command begins, or to its streams, is found nowhere else.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fairseq_posenc import locks, registry
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.workbench import cli, preprocessing
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from tests.helpers.commands import call, refused, script
from tests.helpers.products import WHOLE
from tests.helpers.tiny_models import COMPANIONS, NAMES
from tests.workbench.reports.test_curves import write


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("where", ["add_arguments", "run"])
def test_ctrl_c_is_one_line_in_every_command(name, where, monkeypatch, capsys):
    """Most of the seconds before a command begins are imports, which its options need."""
    monkeypatch.setattr(cli.Command, "add_arguments", lambda *_: None)
    monkeypatch.setattr(cli.Command, where, lambda *_: signal.raise_signal(signal.SIGTERM))
    assert cli.main([name]) == STOPPED
    message = "fairseq-posenc: stopped; the same command continues, or starts again\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("wrong"), 2),
        (RunError("it failed"), 1),
        (OSError(errno.ENOSPC, "no room", "file"), 1),
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
    if code is None:
        with pytest.raises(RuntimeError):
            cli.main(["list"])
    else:
        assert cli.main(["list"]) == code
        assert capsys.readouterr().err.count("\n") == 1


def python(code, *arguments, **streams):
    """Run Python code under the command line's rules for its end."""
    head = f"import sys\nfrom fairseq_posenc.workbench.running.exit_codes import run_main\n{code}"
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            [sys.executable, "-c", f"{head}\nsys.exit(run_main(program))", *map(str, arguments)],
            **{"stdout": said, "stderr": said, **streams},
            check=False,
        )
        said.seek(0)
        return done.returncode, said.read()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_whose_reader_has_gone_ends_without_a_word(stream):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"def program():\n while True: print('of no use to head', file=sys.{stream})"
    assert python(code, **{stream: writer}) == (141, "")
    os.close(writer)


def test_an_output_that_cannot_be_written_is_a_line():
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that the line is written at the end
    with open("/dev/full", "wb", buffering=0) as full:
        code, message = python("def program(): print('a line')", stdout=full, env=buffered)
    assert code == 1
    assert "could not be written (No space left on device)" in message
    assert message.count("\n") == 1


def test_a_deleted_working_folder_is_a_line(tmp_path):
    code = "import os\nos.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
    code += "from fairseq_posenc.workbench.cli import main\n"
    code += "def program(): return main(['count', 'rope'])"
    message = "fairseq-posenc: error: the working folder has been deleted; change to another one\n"
    assert python(code, tmp_path / "gone") == (2, message)


ODD = {
    "half a character": (["describe", "caf\udce9"], "is not UTF-8"),
    "data": (["bleu", "--data", "a:b", "x=y"], "--data: 'a:b': fairseq splits names at ':'"),
    "out": (["compare", "--out", "a:b"], "--out: 'a:b': fairseq splits names at ':'"),
    "lsit": (["lsit"], "there is no command 'lsit': did you mean list? "),
    "qqq": (["qqq"], "there is no command 'qqq': fairseq-posenc --help lists all"),
}


@pytest.mark.parametrize(("words", "message"), ODD.values(), ids=ODD)
def test_odd_arguments_are_refused_before_any_work(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)


def test_a_very_long_message_keeps_its_beginning_and_its_end():
    message = str(UserError(f"first{' word' * 9999} last"))
    assert re.fullmatch("first .{,500} last", message)


def lock_nothing(*_):
    raise OSError(errno.ENOTSUP, "Operation not supported")


def test_a_second_file_system_that_has_no_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as other, lock_folder(tmp_path):
        monkeypatch.setattr("fcntl.flock", lock_nothing)
        with lock_folder(Path(other)), lock_folder(Path(other, "inside")):
            assert capsys.readouterr().err.count("cannot be locked") == 1


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", lock_nothing)
    monkeypatch.setattr(locks, "_held", set())
    (tmp_path / "text").write_text("a b c\n" * 9)
    out = tmp_path / "out"
    words = ["preprocess", "plain_text", "--words", "--train", tmp_path / "text", "--out", out]
    assert call(capsys, *words)[1].count("cannot be locked (Operation not supported)") == 1
    assert (out / "manifest.json").exists()
    assert not list(out.glob("*.posenc-*"))


@pytest.mark.parametrize("words", [["--help"], ["user-dir"]], ids=lambda words: words[0])
def test_what_needs_no_torch_starts_at_once(words):
    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    subprocess.run([script("fairseq-posenc"), *words], check=True, stdout=subprocess.DEVNULL)
    assert seconds() - before < 0.6  # a sixth of it where nothing else runs; torch takes 1.5


def test_the_list_has_every_encoding_and_companion(capsys):
    lines = call(capsys, "list")[0].splitlines()
    for name, line in zip(sorted([*NAMES, *COMPANIONS]), lines, strict=True):
        assert line.split()[:2] == [name, registry.get(name).acts_on]
        assert line.endswith(f"  {catalogue.parse_page(name)['summary'].replace('``', '')}")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fairseq-posenc us", {"user-dir"}),
        pytest.param("fairseq-posenc count --max", {"--max-positions"}, marks=pytest.mark.slow),
        ("fairseq-posenc preprocess wiki", {"wikipedia", "wikitext"}),
    ],
)
def test_a_shell_is_shown_how_words_go_on(line, found, tmp_path):
    answer = tmp_path / "answer"
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "IFS": "\n"}
    shell["_ARGCOMPLETE_STDOUT_FILENAME"] = str(answer)
    subprocess.run([script("fairseq-posenc")], env={**os.environ, **shell}, check=True)
    assert {word.strip() for word in answer.read_text().split("\v")} == found


PROGRAMS = {x.stem: x.read_text("utf-8") for x in preprocessing.FOLDER.glob("*.py")}
HELPS = {  # each line of a help that names a command or a program ends with its description
    "--help": {name: command.help for name, command in cli.COMMANDS.items()},
    "preprocess --help": {x: text.split("\n")[0].lstrip('r"') for x, text in PROGRAMS.items()},
}


@pytest.mark.parametrize("words", HELPS)
def test_a_help_lists_every_name_once(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    for name, description in HELPS[words].items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith(f"  {description}")


def test_preprocess_leaves_ctrl_c_as_it_was_if_a_program_cannot_be_imported():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ModuleNotFoundError):
        preprocessing.run(argparse.Namespace(program="absent", options=[]))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_environment_changes_no_command(tmp_path):
    code = "from fairseq_posenc.workbench.cli import main\n"
    code += "def program(): return main(sys.argv[1:])"
    if WHOLE:  # compiles all of torch for PYTHONOPTIMIZE
        code += " or main(['describe', 'rope'])"
    curves = ["learning-curves", f"a={write(tmp_path / 'a', 8, 7)}", "--out", tmp_path / "out"]
    environment = {**os.environ, "MPLBACKEND": "evil", "PYTHONOPTIMIZE": "2" if WHOLE else ""}
    assert python(code, *curves, env=environment)[0] == 0
