"""The support table says what runs."""

from __future__ import annotations

from tests.helpers import support


def test_the_support_table_is_what_runs():
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run make docs"
