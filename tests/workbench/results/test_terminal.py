"""Reports on a terminal: no marks, aligned columns, lines that fit."""

from __future__ import annotations

import pytest

from fairseq_posenc.workbench.results import markdown, terminal


@pytest.fixture(autouse=True)
def _columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_a_table_is_aligned_and_has_no_bars():
    rows = [("`m4m`", "8,128"), ("a|b", "1")]
    shown = terminal.format_report(markdown.table(("encoding", "size"), rows))
    assert shown.splitlines() == ["encoding   size", "m4m       8,128", "a|b           1"]


def test_text_is_wrapped_and_its_marks_are_gone():
    report = (
        "**Ranks** of `rope` mean something, see [there](there.md), from here on.\n\n- `a`"
        + " b" * 30
    )
    lines = terminal.format_report(report).splitlines()
    assert lines[0].startswith("Ranks of rope mean something, see there,")
    assert max(map(len, lines)) <= 40
    assert lines[-1].startswith("  b")


def test_commands_stay_whole():
    command = "    fairseq-posenc choose " + "--text my.txt " * 5
    assert terminal.format_report(f"Text.\n\n{command}").splitlines()[-1] == command


def test_foreign_text_is_shown_as_it_is():
    text = "a`b and [a link](to) | <i>"
    assert terminal.strip_marks(markdown.escape(text)) == text
    (_, _, row) = markdown.table(["x"], [[markdown.escape(text)]]).splitlines()
    assert terminal.strip_marks(row) == f"| {text} |"
