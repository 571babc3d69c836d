"""Extracts text from the lines of corpus files, in the formats of several corpora.

A format turns one line of a file into lines of text, and "" at the end of a document. It needs no
other line, so several processes can share a file. A format that is a function must not be renamed:
manifests record its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

from fairseq_posenc.errors import UserError


class LineFormat(Protocol):
    """A function that extracts lines of text from a line of a file; "" ends a document."""

    def __call__(self, line: str, /) -> Sequence[str]:
        """Extract the lines of text, which the caller strips; an empty one ends a document."""


_ABSENT = object()  # in place of the value of a field that an object lacks
_SURROGATE = re.compile("[\ud800-\udfff]")
# WikiText's headings are ` = Title = ` for an article, ` = = Section = = ` and so on inside it.
_HEADING = re.compile(r"\s*=\s.*\s=\s*")
_TITLE = re.compile(r"\s*=\s(?!=).*(?<!=)\s=\s*")  # a single = on each side


def plain(line: str) -> Sequence[str]:
    """Read plain text, in which an empty line ends a document."""
    return (line,)


class JsonField(NamedTuple):
    """Reads a JSON object per line, with a document in a field (C4, OpenWebText2, the Pile)."""

    field: str  # name of the field with the text; `meta.title` is a field inside another
    # (field, value): objects with another value are left out; None keeps all
    where: Optional[tuple[str, str]] = None

    def __call__(self, line: str) -> Sequence[str]:
        """Extract the document's lines and "".

        Raises:
            ValueError: the line is not a JSON object with the text.
        """
        if not line.strip():
            return ()
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not a JSON object ({error})") from None
        if self.where:
            field, value = self.where
            if value not in _spell(_look_up(record, field)):
                return ()
        text = _look_up(record, self.field)
        if not isinstance(text, str):
            raise ValueError(f'not a JSON object with a text "{self.field}"')
        if _SURROGATE.search(text):
            raise ValueError("half of a surrogate pair is not a character")
        return [*filter(str.strip, split_lines(text)), ""]


def _look_up(record: object, path: str) -> object:
    """Look up the value of ``meta.title`` as a name, or as a path."""
    if not isinstance(record, dict):
        return _ABSENT
    first, dot, rest = path.partition(".")
    is_path = dot and path not in record
    return _look_up(record.get(first), rest) if is_path else record.get(path, _ABSENT)


def _spell(value: object) -> tuple[str, ...]:
    """List how ``--where`` may spell a value: JSON's ``true`` is also Python's ``True``."""
    if value is _ABSENT:
        return ()
    return (value,) if isinstance(value, str) else (json.dumps(value), str(value))


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
    """Reads WikiText-2 and -103: a paragraph per line, headings, empty lines."""

    articles: bool  # whether documents are articles; else every empty line ends a document
    headings: bool  # whether to keep headings

    def __call__(self, line: str) -> Sequence[str]:
        """Keep or drop the line; for ``articles``, put "" before a title."""
        kept = (line,) if self.headings or not _HEADING.fullmatch(line) else ()
        if not self.articles:
            return kept
        if _TITLE.fullmatch(line):
            return ("", *kept)
        return kept if line.strip() else ()


def split_lines(text: str) -> list[str]:
    r"""Split at ``\n``, ``\r\n`` and ``\r`` only, as Python's text files do."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if not lines[-1]:  # after the last line feed
        lines.pop()
    return lines


def describe_format(line_format: LineFormat) -> str:
    """Describe a format for manifests: a function by its name, a tuple with its settings."""
    return getattr(line_format, "__name__", None) or repr(line_format)
