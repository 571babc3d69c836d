"""Tables in Markdown, for every report and every generated page.

Not by tabulate, which pads cells to the width of their column: one longer figure would change each
line of a page that is kept. It leaves ``|`` in a cell as it is, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import CONTROL

_RULES = {"l": "---", "r": "---:"}
_BAR = re.compile(r"(?<!\\)\|")  # it would end a cell


def plain(text: str) -> str:
    """Write control characters out, as in names of files, so that a text stays in its line."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Format a table.

    Columns are aligned ``l`` or ``r``, left or right; the last letter holds for all that follow.
    """
    rule = [_RULES[align[min(column, len(align) - 1)]] for column in range(len(header))]
    head, *lines = ([_BAR.sub(r"\|", plain(cell)) for cell in row] for row in (header, *rows))
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
