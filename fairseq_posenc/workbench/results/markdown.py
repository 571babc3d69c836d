"""Tables in Markdown, for every report and every generated page.

Not by tabulate, which pads cells to the width of their column: one longer figure would change each
line of a page that is kept. It leaves ``|`` in a cell as it is, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError, printable

_RULES = {"l": "---", "r": "---:"}
_BAR = re.compile(r"(?<!\\)\|")  # it would end a cell
# What begins HTML or code, or makes a link, a picture or a reference of what stands before it;
# and the backslashes before that, which would take an escape away.
_ACTIVE = re.compile(r"(\\*)(<|`|\](?=[(\[:]))")
_TICKS = re.compile("`+")


def escape(text: str) -> str:
    """Write a text of somebody else's so that a page shows it, and nothing of it is active."""

    def replace(match: re.Match[str]) -> str:
        return match[1] * 2 + ("&lt;" if match[2] == "<" else f"\\{match[2]}")

    return _ACTIVE.sub(replace, printable(text))


def code(text: str) -> str:
    """Format a text of somebody else's as code, whatever backquotes it has."""
    longest = max(map(len, _TICKS.findall(text)), default=0)
    ticks, space = "`" * (longest + 1), " " if longest else ""
    return f"{ticks}{space}{printable(text)}{space}{ticks}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Format a table.

    Columns are aligned ``l`` or ``r``, left or right; the last letter holds for all that follow.
    """
    rule = [_RULES[align[min(column, len(align) - 1)]] for column in range(len(header))]
    head, *lines = ([_BAR.sub(r"\|", printable(cell)) for cell in row] for row in (header, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def fill_page(path: Path, start: str, content: str, end: str) -> str:
    """Replace what stands between two markers of a page.

    Raises:
        UserError: the page has no such place.
    """
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    return fill_text(old, path, start, content, end)


def fill_text(text: str, path: Path, start: str, content: str, end: str) -> str:
    """Replace what stands between two markers of a text; errors name ``path``.

    Raises:
        UserError: the text has no such place.
    """
    before, begins, rest = text.partition(start)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise UserError(f"{path} has no line {start!r}, or none {end!r} after it")
    return f"{before}{start}{content}{end}{after}"
