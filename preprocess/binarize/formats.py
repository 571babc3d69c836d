"""Corpus formats: each turns one line of a file into lines of text, and "" where a document ends.

A format reads one line alone, so that any number of processes can share a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple, Optional, Protocol

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import PARQUET


class LineFormat(Protocol):
    """Extracts the lines of text from a line of a corpus, "" where a document ends."""

    def __call__(self, line: str, /) -> Sequence[str]:
        """Extract the lines of text."""


# WikiText marks its headings with spaced equal signs: one for the title of an article.
_HEADING = re.compile(r"\s*=\s.*\s=\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TITLE = re.compile(r"\s*=\s(?!=).*(?<!=)\s=\s*")


def plain(line: str) -> Sequence[str]:
    """Read plain text: a line is a line, and an empty one ends a document."""
    return (line,)


class JsonField(NamedTuple):
    """A JSON object a line, one of whose fields holds a document (C4, OpenWebText2, the Pile)."""

    field: str  # name of the text's field; a field inside another is written `meta.title`
    # a field and its value; objects with another value are left out. None for all
    where: Optional[tuple[str, str]] = None

    def __call__(self, line: str) -> Sequence[str]:
        """Extract the document's lines and "".

        Raises:
            ValueError: not a JSON object, or one without the text.
        """
        if not line.strip():
            return ()
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not a JSON object ({error})") from None
        if self.where and str(_look_up(record, self.where[0])) != self.where[1]:
            return ()
        text = _look_up(record, self.field)
        if not isinstance(text, str):
            raise ValueError(f'not a JSON object with a text "{self.field}"')
        if _SURROGATE.search(text):
            raise ValueError("half of a surrogate pair is not a character")
        return (*(part for part in split_lines(text) if part.strip()), "")


def _look_up(record: object, path: str) -> object:
    """Look up the value under a dotted path, or under the whole of it as a name; None if absent."""
    if isinstance(record, dict) and path in record:
        return record[path]
    first, _, rest = path.partition(".")
    inside = record.get(first) if isinstance(record, dict) else None
    return _look_up(inside, rest) if rest else inside


def parse_where(text: Optional[str]) -> Optional[tuple[str, str]]:
    """Parse ``FIELD=VALUE``; None stays None.

    Raises:
        UserError: the text has another form.
    """
    if text is None:
        return None
    field, equals, value = text.partition("=")
    if not (field and equals):
        raise UserError(f"--where {text}: write FIELD=VALUE, as in meta.pile_set_name=Pile-CC")
    return field, value


def wikipedia(line: str) -> Sequence[str]:
    """Read WikiExtractor's files: ``<doc ...>``, the title, paragraphs, ``</doc>``."""
    if line.startswith("<doc ") or line.startswith("</doc>"):
        return ("",)
    return (line,) if line.strip() else ()


class WikiText(NamedTuple):
    """WikiText-2 and -103: a paragraph a line, headings between equal signs, empty lines."""

    articles: bool  # an empty line only where an article ends, not around headings
    headings: bool  # keep the lines with headings

    def __call__(self, line: str) -> Sequence[str]:
        """Keep or drop the line; "" comes before one that begins an article."""
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


def describe_format(lines: LineFormat) -> str:
    """Describe a format with its settings, for manifests."""
    return getattr(lines, "__name__", None) or repr(lines)


def check_format(lines: LineFormat, paths: Sequence[str]) -> None:
    """Refuse to take the rows of a Parquet file for lines of text, before anything is written.

    Raises:
        UserError: a Parquet file and a format of text lines; or pyarrow is not installed.
    """
    for path in paths:
        if path.endswith(PARQUET):
            if not isinstance(lines, JsonField):
                raise UserError(f"{path}: Parquet is read by json_lines.py")
            if find_spec("pyarrow") is None:
                raise UserError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow")
