"""The catalogue and the README agree with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import oracles
from fairseq_posenc import cli, documentation, registry

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_table_is_up_to_date():
    assert cli.main(["docs", "--check", "--readme", str(README)]) == 0


def test_an_outdated_table_is_noticed_and_mended(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{documentation.START}\nold\n{documentation.END}\nafter\n")
    assert cli.main(["docs", "--check", "--readme", str(readme)]) == 2
    assert "is out of date: run make docs" in capsys.readouterr().err
    assert cli.main(["docs", "--readme", str(readme)]) == 0
    assert cli.main(["docs", "--check", "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `m4m` |" in text


@pytest.mark.parametrize("name", registry.names())
def test_base_size_counts_are_those_of_the_formulas(name):
    counted = documentation.count(
        registry.parse(name), documentation.BASE, documentation.BASE_LAYERS
    )
    assert counted == oracles.parameter_count(name, m=12, n=512, d=64, D=768, h=12)


def test_list_names_every_encoding(capsys):
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == registry.names()


def test_user_dir_is_the_package(capsys):
    assert cli.main(["user-dir"]) == 0
    assert Path(capsys.readouterr().out.strip(), "registry.py").is_file()


def test_a_missing_marker_is_one_line(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    assert cli.main(["docs", "--readme", str(readme)]) == 2
    assert capsys.readouterr().err.startswith("fairseq-posenc: error: ")
