"""What ``--corpus`` asks for: the text, how much of it, and how much is held out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

from binarize.formats import JsonField, LineFormat, WikiText, parse_where, plain, wikipedia
from fairseq_posenc.errors import UserError

_SETTINGS = ("size", "hold-out", "field", "where")
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
        size: bytes of text to draw; None for all.
        hold_out: how many sentences or documents are for validation.
    """

    name: str
    lines: LineFormat
    paths: list[str]
    size: Optional[int]
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
    hold_out = settings.get("hold-out", "0")
    if not hold_out.isdecimal():
        raise UserError(f"{called}: hold-out= is a number of sentences or documents")
    size = parse_size(settings["size"]) if "size" in settings else None
    return Corpus(called, lines, paths, size, int(hold_out))


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``64GiB``.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)", text)
    if not found:
        raise UserError(f"size={text}: write a number of {', '.join(_UNITS)}, as in 64GiB")
    return int(float(found[1]) * _UNITS[found[2]])
