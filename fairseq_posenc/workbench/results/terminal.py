"""Formats reports in Markdown for a terminal: removes marks, aligns tables and wraps lines."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from fairseq_posenc.workbench.results.markdown import BAR

_MAX_COLUMNS = 100  # longer lines are hard to read on any terminal
_LINK = re.compile(r"!?\[([^\]]*)(?<!\\)\]\([^)]*\)")
_ESCAPED_OR_CODE = re.compile(r"\\([|`\]])|`")  # an escaped character, or a mark of code


def format_report(report: str) -> str:
    """Format a report in Markdown for the terminal.

    Tables are never wrapped, nor are lines that begin with spaces, such as commands to be copied.
    """
    return "\n".join(_format_blocks(report.splitlines(), count_columns()))


def count_columns() -> int:
    """Count the columns to fill: those of the terminal, limited for readability."""
    return min(shutil.get_terminal_size().columns, _MAX_COLUMNS)


def wrap(text: str, columns: int, indent: str = "") -> str:
    """Wrap a line at spaces only; all lines after the first begin with ``indent``."""
    return textwrap.fill(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def strip_marks(text: str) -> str:
    """Remove the Markdown of code, bold text and links."""
    # `markdown.escape` writes `<` as an entity, and a table's cells have bars escaped.
    text = _LINK.sub(r"\1", text).replace("&lt;", "<").replace("**", "")
    return _ESCAPED_OR_CODE.sub(r"\1", text)


def _format_blocks(lines: Sequence[str], columns: int) -> Iterator[str]:
    for is_table, block in groupby(lines, lambda line: line.startswith("|")):
        if is_table:
            yield from _align(list(block))
            continue
        for text in map(strip_marks, block):
            if text.startswith(" "):
                yield text
            else:
                yield wrap(text, columns, indent="  " if text.startswith("- ") else "")


def _align(table: Sequence[str]) -> Iterator[str]:
    """Align the columns of a table, given as lines: header, rule and rows."""
    header, rule, *rows = (
        [strip_marks(cell.strip()) for cell in BAR.split(line)[1:-1]] for line in table
    )
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if mark.endswith(":") else cell.ljust(width)
            for cell, mark, width in zip(row, rule, widths)
        ]
        yield "  ".join(cells).rstrip()
