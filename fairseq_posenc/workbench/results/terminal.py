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
    width = min(shutil.get_terminal_size().columns, _LONGEST)
    return "\n".join(_format_blocks(report.splitlines(), width))


def strip_marks(text: str) -> str:
    """Take the marks of code, bold text and links out of a text."""
    text = _LINK.sub(r"\1", text).replace(r"\|", "|").replace("&lt;", "<")
    return text.replace("**", "").replace("`", "")


def _format_blocks(lines: Sequence[str], width: int) -> Iterator[str]:
    table: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            table.append([strip_marks(cell.strip()) for cell in _BAR.split(line)[1:-1]])
            continue
        if table:
            yield from _align(table)
            table = []
        yield from _wrap(line, width)
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


def _wrap(line: str, width: int) -> list[str]:
    text = strip_marks(line)
    if not text or text.startswith(" "):
        return [text]
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
