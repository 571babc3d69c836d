"""Formats tables, code and foreign text in Markdown, for all reports and generated pages.

The library tabulate pads cells to the width of their column, so one longer figure would change
every line of a page under version control, and it does not escape ``|``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError, printable

_RULES = {"l": "---", "r": "---:"}
_BAR = re.compile(r"(?<!\\)\|")  # an unescaped bar ends a cell
# Characters that begin HTML or code, or turn the preceding text into a link or a picture, with the
# backslashes before them, which would undo an escape.
_ACTIVE = re.compile(r"(\\*)(<|`|\](?=[(\[:]))")
_TICKS = re.compile("`+")


def escape(text: str) -> str:
    """Escape foreign text, so that a page shows it and no part of it becomes markup."""

    def replace(match: re.Match[str]) -> str:
        return match[1] * 2 + ("&lt;" if match[2] == "<" else f"\\{match[2]}")

    return _ACTIVE.sub(replace, printable(text))


def code(text: str) -> str:
    """Format foreign text as code, even if it contains backquotes."""
    longest = max(map(len, _TICKS.findall(text)), default=0)
    ticks = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{ticks}{space}{printable(text)}{space}{ticks}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Format a table.

    Letters of ``align`` align columns left (``l``) or right (``r``); the last one is repeated.
    """
    rule = [_RULES[align[min(column, len(align) - 1)]] for column in range(len(header))]
    head, *lines = ([_BAR.sub(r"\|", printable(cell)) for cell in row] for row in (header, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def fill_page(path: Path, start: str, content: str, end: str, text: str | None = None) -> str:
    """Replace the text between two markers of a page, and return the new page.

    ``text`` is the page as it is; by default that of the file.

    Raises:
        UserError: the page lacks a marker.
    """
    if text is None:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, begins, rest = text.partition(start)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise UserError(f"{path} has no line {start!r}, or none {end!r} after it")
    return f"{before}{start}{content}{end}{after}"
