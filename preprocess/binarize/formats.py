"""What one line of a corpus file holds: lines of text, and "" where a document ends.

Each format looks at one line alone, so that any number of processes can share a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Callable, NamedTuple

LineFormat = Callable[[str], Sequence[str]]

# WikiText marks its headings with spaced equal signs: one for the title of an article.
_HEADING = re.compile(r"\s*=\s.*\s=\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TITLE = re.compile(r"\s*=\s(?!=).*(?<!=)\s=\s*")


def plain(line: str) -> Sequence[str]:
    """Plain text: a line is a line, and an empty one ends a document."""
    return (line,)


class JsonField(NamedTuple):
    """A JSON object a line, one of whose fields holds a document (C4, OpenWebText2, the Pile)."""

    field: str

    def __call__(self, line: str) -> Sequence[str]:
        """Return the document's lines and "".

        Raises:
            ValueError: no JSON object, or one without that text.
        """
        if not line.strip():
            return ()
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a JSON object ({error})") from None
        text = record.get(self.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'not a JSON object with a text "{self.field}"')
        if _SURROGATE.search(text):
            raise ValueError("half of a surrogate pair is no character")
        return (*(part for part in split_lines(text) if part.strip()), "")


def wikipedia(line: str) -> Sequence[str]:
    """WikiExtractor's files: ``<doc ...>``, the title, paragraphs, ``</doc>``."""
    if line.startswith("<doc ") or line.startswith("</doc>"):
        return ("",)
    return (line,) if line.strip() else ()


class WikiText(NamedTuple):
    """WikiText-2 and -103: a paragraph a line, headings between equal signs, empty lines.

    Attributes:
        articles: an empty line only where an article ends, not around headings.
        headings: keep the lines with headings.
    """

    articles: bool
    headings: bool

    def __call__(self, line: str) -> Sequence[str]:
        """Return the line, if it is kept, after "" if an article begins with it."""
        kept = (line,) if self.headings or not _HEADING.fullmatch(line) else ()
        if not self.articles:
            return kept
        if _TITLE.fullmatch(line):
            return ("", *kept)
        return kept if line.strip() else ()


def split_lines(text: str) -> list[str]:
    r"""Split as Python's text files do: at ``\n``, ``\r\n`` and ``\r``, and nowhere else."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines
