"""What ``--corpus`` asks for: the text, how much of it, and how much is held out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

from binarize.formats import JsonField, LineFormat, WikiText, parse_where, plain, wikipedia
from fairseq_posenc.errors import UserError

_SETTINGS = ("size", "lines", "hold-out", "field", "where")
DOCUMENTS, LINES, BYTES = "documents", "lines", "bytes"
_FORMATS: dict[str, LineFormat] = {
    "plain": plain,
    "json": JsonField("text"),
    "wikipedia": wikipedia,
    "wikitext": WikiText(articles=True, headings=True),
}
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Corpus(NamedTuple):
    """A corpus to draw from.

    Attributes:
        name: what a message calls it.
        lines: what a line of its files holds.
        paths: files and directories.
        size: how much to draw, in ``unit``; None for all.
        unit: ``bytes`` or ``lines``, which ``--sentences`` makes sentences.
        hold_out: how many sentences or documents are for validation.
    """

    name: str
    lines: LineFormat
    paths: list[str]
    size: Optional[int]
    unit: str
    hold_out: int


def parse_corpus(words: Sequence[str]) -> Corpus:
    """Parse ``FORMAT PATH ... [SETTING=VALUE ...]``.

    Raises:
        UserError: it is not written so.
    """
    settings: dict[str, str] = {}
    paths = []
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals and name in _SETTINGS:
            settings[name] = value
        else:
            paths.append(word)
    called = f"--corpus {' '.join(words)}"
    if words[0] not in _FORMATS or not paths:
        raise UserError(f"{called}: give a format ({', '.join(_FORMATS)}), then files or folders")
    lines = _FORMATS[words[0]]
    if isinstance(lines, JsonField):
        lines = JsonField(settings.get("field", "text"), parse_where(settings.get("where")))
    elif settings.keys() & {"field", "where"}:
        raise UserError(f"{called}: field= and where= are for json")
    size, unit = _drawn(called, settings)
    hold_out = _number(called, "hold-out", settings.get("hold-out", "0"))
    return Corpus(called, lines, paths, size, unit, hold_out)


def _drawn(called: str, settings: dict[str, str]) -> tuple[Optional[int], str]:
    """Return how much to draw, None for all, and its unit."""
    if "lines" not in settings:
        return (parse_size(settings["size"]) if "size" in settings else None), BYTES
    if "size" in settings:
        raise UserError(f"{called}: give size= or lines=, not both")
    return _number(called, "lines", settings["lines"]), LINES


def _number(called: str, name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{called}: {name}= is a number of sentences or documents")
    return int(text)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``64GiB``.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)", text)
    if not found:
        raise UserError(f"size={text}: write a number of {', '.join(_UNITS)}, as in 64GiB")
    return int(float(found[1]) * _UNITS[found[2]])
