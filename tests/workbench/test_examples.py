"""Examples that a command's help ends with can be given as they are; the tests of each run it."""

import shlex

import pytest

from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.examples import EXAMPLES
from fairseq_posenc.workbench.finetuning.squad.command import ACTIONS


def test_every_command_has_examples():
    assert EXAMPLES.keys() == cli.COMMANDS.keys() | {f"squad {name}" for name in ACTIONS}
    for name, lines in EXAMPLES.items():
        assert all(f"fairseq-posenc {name}" in line for line in lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_ends_with_them(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split(), "--help"])
    assert ended.value.code == 0
    message = capsys.readouterr()
    assert message.out.endswith("\n  ".join(["\nexamples:", *EXAMPLES[name]]) + "\n")
    assert not message.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_they_can_be_given(name, monkeypatch):
    monkeypatch.setattr(cli.Command, "run", lambda command, args: 0)
    for line in EXAMPLES[name]:
        program, *words = shlex.split(line)
        if program == "fairseq-posenc" and "--help" not in words:
            assert cli.main(words) == 0, line
