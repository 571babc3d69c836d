"""The blocks of code that the README and the pages show."""

import re
import textwrap
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path

from tests.helpers.commands import new_directory

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(kinds: Collection[str], page: Path) -> list[str]:
    """Return the fenced blocks of a page of some kinds."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(text) for _, kind, text in found if kind in kinds]


scripts = partial(blocks, ("", "sh", "bash"))  # of commands; blocks of other kinds say so
python_of = partial(blocks, ("python",))


@cache
def own_encodings() -> Path:
    """Return the user's package that adding.md shows."""
    folder = new_directory() / "my_encodings"
    folder.mkdir()
    for name, code in zip(("root.py", "__init__.py"), python_of(ROOT / "docs" / "adding.md")):
        (folder / name).write_text(code)
    return folder
