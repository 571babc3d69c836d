"""Tables on a terminal: aligned columns."""

from __future__ import annotations

from fairseq_posenc.workbench.results import terminal


def test_a_table_is_aligned():
    shown = terminal.align([("encoding", "size"), ("m4m", "8,128"), ("a|b", "1")], left=1)
    assert shown.splitlines() == ["encoding   size", "m4m       8,128", "a|b           1"]
