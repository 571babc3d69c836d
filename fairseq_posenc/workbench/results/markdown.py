"""Formats Markdown for reports and pages, fills generated parts of a page, aligns plain tables.

Tables are not made by the library tabulate: it does not escape ``|``, and it pads cells to the
width of their column, so one longer figure would change all lines of a page in version control.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError, printable

_RULES = {"l": "---", "r": "---:"}
BAR = re.compile(r"(?<!\\)\|")  # ends a cell of a table; a bar after any backslash does not
# Backslashes, and a character that begins HTML or code, or ends the text of a link or a picture.
_ACTIVE = re.compile(r"(?P<backslashes>\\*)(?P<character><|`|\](?=[(\[:]))")
_TICKS = re.compile("`+")


def escape(text: str) -> str:
    """Escape foreign text: it becomes no HTML, code or link; only emphasis may stay."""

    def replace(match: re.Match[str]) -> str:
        character = match["character"]
        # Backslashes are doubled, because an odd number would undo the escape: "\`" -> "\\\`".
        return match["backslashes"] * 2 + ("&lt;" if character == "<" else f"\\{character}")

    return _ACTIVE.sub(replace, printable(text))


def code(text: str) -> str:
    """Format foreign text as code, even if it contains backquotes."""
    longest = max(map(len, _TICKS.findall(text)), default=0)
    ticks = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{ticks}{space}{printable(text)}{space}{ticks}"


def format_number(value: float | None, digits: int = 0) -> str:
    """Format a number with ``digits`` decimals; None, NaN and infinity become ``-``."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Format a table; foreign text in its cells must be escaped (:func:`escape`).

    Letters of ``align`` align columns left (``l``) or right (``r``); the last one is repeated.
    """
    rule = [_RULES[align[min(column, len(align) - 1)]] for column in range(len(header))]
    head, *lines = ([BAR.sub(r"\|", printable(cell)) for cell in row] for row in (header, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Align the columns of a table: the first ``left`` columns to the left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def fill_page(path: Path, start: str, content: str, end: str, text: str | None = None) -> str:
    """Replace the text between two markers of a page, and return the new page.

    ``text`` is the content of the page; by default it is read from the file.

    Raises:
        UserError: the page lacks a marker.
    """
    if text is None:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise UserError(f"{path} has no line {start!r} with a line {end!r} after it")
    return f"{before}{start}{content}{end}{after}"
