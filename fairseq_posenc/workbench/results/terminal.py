"""Formats reports in Markdown for a terminal: without marks, with aligned tables, lines wrapped."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

_LONGEST = 100  # columns; longer lines are hard to read on any terminal
_BAR = re.compile(r"(?<!\\)\|")  # an unescaped bar ends a cell
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def show(report: str) -> str:
    """Format a report in Markdown for the terminal.

    Tables are never wrapped, nor are lines that begin with spaces, such as commands to be copied.
    """
    return "\n".join(_format_blocks(report.splitlines(), width()))


def width() -> int:
    """Return the number of columns to fill: the terminal's, limited for readability."""
    return min(shutil.get_terminal_size().columns, _LONGEST)


def wrap(text: str, columns: int, indent: str = "") -> str:
    """Wrap a line at spaces only; all lines after the first begin with ``indent``."""
    return textwrap.fill(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def strip_marks(text: str) -> str:
    """Remove the Markdown of code, bold text and links."""
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
