"""Examples that a command's help ends with run, as they stand there, on small data.

The last one of each command runs, with most options; all others are read as commands. Where
products are whole, all run.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.examples import EXAMPLES
from fairseq_posenc.workbench.finetuning.squad.command import ACTIONS
from tests.helpers.commands import new_directory, trained
from tests.helpers.documented import FILES, run
from tests.helpers.products import some_of

# What takes long and is run by other tests, too, with other options.
LONG = ["bleu", "compare", "doctor", "glue", "lm-length", "swap", "user-dir"]
SHORT = [name for name in EXAMPLES if name not in LONG and not name.startswith("squad")]
OWN = {"checkpoints": lambda: trained("masked_lm").save_dir}


def test_every_command_has_examples():
    assert EXAMPLES.keys() == cli.COMMANDS.keys() | {f"squad {name}" for name in ACTIONS}
    for name, lines in EXAMPLES.items():
        assert all(f"fairseq-posenc {name}" in line for line in lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_ends_with_them(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split(), "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert told.out.endswith("\n  ".join(["\nexamples:", *EXAMPLES[name]]) + "\n")
    assert not told.err


@pytest.fixture
def folder():
    return new_directory()


def run_examples(lines: list[str], folder: Path) -> None:
    for line in lines:
        printed = run(line, folder, {**FILES, **OWN})
        if "--json" in line:
            json.loads(printed)


@pytest.mark.parametrize("name", EXAMPLES)
def test_they_can_be_given(name, monkeypatch):
    monkeypatch.setattr(cli.Command, "run", lambda command, args: 0)
    for line in EXAMPLES[name]:
        program, *words = shlex.split(line)
        if program == "fairseq-posenc" and "--help" not in words:
            assert cli.main(words) == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(SHORT, [*SHORT, *LONG]))
def test_they_run(name, folder):
    run_examples(some_of(EXAMPLES[name][-1:], EXAMPLES[name]), folder)


@pytest.mark.matrix  # docs/finetune.md has them too
def test_those_of_squad_run_one_after_the_other(folder):
    for name in (name for name in EXAMPLES if name.startswith("squad")):
        run_examples(EXAMPLES[name], folder)
