"""Reports on a terminal: Markdown without its marks, tables with aligned columns, long lines cut.

Reports are written once, in Markdown. Files keep it; a terminal shows what this module makes of it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

_LONGEST = 100  # columns; longer lines are hard to read on any terminal
_BAR = re.compile(r"(?<!\\)\|")  # ends a cell; `\|` is one of its characters
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def show(report: str) -> str:
    """Format a report in Markdown for the terminal that is there.

    Tables stay whole, also where they are wider; so do lines that begin with spaces, as commands
    do, because they may be copied.
    """
    return "\n".join(_format_blocks(report.splitlines(), width()))


def width() -> int:
    """Return the columns to fill: those of the terminal, or fewer if it is very wide."""
    return min(shutil.get_terminal_size().columns, _LONGEST)


def wrap(text: str, columns: int, indent: str = "") -> str:
    """Break a line at spaces; all but the first line begin with ``indent``.

    Words that are longer than a line, such as paths, stay whole.
    """
    return textwrap.fill(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def strip_marks(text: str) -> str:
    """Take the marks of code, bold text and links out of a text."""
    text = _LINK.sub(r"\1", text).replace(r"\|", "|").replace("&lt;", "<")
    return text.replace("**", "").replace("`", "")


def _format_blocks(lines: Sequence[str], columns: int) -> Iterator[str]:
    table: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            table.append([strip_marks(cell.strip()) for cell in _BAR.split(line)[1:-1]])
            continue
        if table:
            yield from _align(table)
            table = []
        text = strip_marks(line)
        yield (
            text
            if text.startswith(" ")
            else wrap(text, columns, "  " if text.startswith("- ") else "")
        )
    if table:
        yield from _align(table)


def _align(table: Sequence[Sequence[str]]) -> Iterator[str]:
    header, rule, *rows = table
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if mark.endswith(":") else cell.ljust(width)
            for cell, mark, width in zip(row, rule, widths)
        ]
        yield "  ".join(cells).rstrip()
