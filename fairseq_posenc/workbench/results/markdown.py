"""Formats Markdown for reports and pages, fills generated parts of a page, aligns plain tables.

Tables are not made by the library tabulate: it does not escape ``|``, and it pads cells to the
width of their column, so one longer figure would change all lines of a page in version control.
"""

import math
import re
from collections.abc import Iterable, Sequence

from fairseq_posenc.errors import UserError, printable

BAR = re.compile(r"(?<!\\)\|")  # ends a cell of a table; a bar after any backslash does not


def code(text: str) -> str:
    """Format untrusted text as code, even if it contains backquotes; an empty one stays empty."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * (longest + 1) if text else ""
    space = " " if longest else ""
    return f"{ticks}{space}{printable(text)}{space}{ticks}"


def format_number(value: float | None, digits: int = 0) -> str:
    """Format a number with ``digits`` decimals, a huge one as 1.2e+34; ``-`` if not finite."""
    text = "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"
    return text if len(text) < 20 else f"{value:.4g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Format a table; untrusted text in its cells must be formatted by :func:`code`.

    Letters of ``align`` align columns left (``l``) or right (``r``); the last one is repeated.
    """
    lines = [[BAR.sub(r"\|", printable(cell)) for cell in row] for row in (header, *rows)]
    rule = ["---:" if x == "r" else "---" for x in align.ljust(len(header), align[-1])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))


def align_columns(rows: Sequence[Sequence[str]], left: int) -> str:
    """Align the columns of a table: the first ``left`` columns to the left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    marks = "<" * left + ">" * (len(widths) - left)  # of Python's format specifications
    cells = [[f"{x:{mark}{width}}" for x, mark, width in zip(row, marks, widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def fill_page(text: str, start: str, content: str, end: str) -> str:
    """Replace the text between two markers, ``start`` and ``end``; return the new page.

    Raises:
        UserError: the page lacks a marker.
    """
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise UserError(f"the page has no line {start!r} with a line {end!r} after it")
    return f"{before}{start}{content}{end}{after}"
