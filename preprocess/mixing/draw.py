"""Draws documents, and sentences to hold out: at random, but exactly as many as wanted.

Both are Knuth's selection sampling (The Art of Computer Programming, 3.4.2, algorithm S): the next
one is chosen with the probability `still wanted / still there`. Each has the same chance, the
number comes out exactly, and nothing has to be kept in memory. The random number is a hash of the
seed and of the document's or sentence's number, so that reading may begin anywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
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


class CorpusRequest(NamedTuple):
    """A corpus to draw from."""

    name: str  # name in messages
    lines: LineFormat  # format of its files
    paths: list[str]  # files and directories
    size: Optional[int]  # amount to draw, in `unit`; None for all
    unit: str  # `bytes`, or `lines`, which are sentences with `--sentences`
    hold_out: int  # number of sentences or documents for validation


def parse_corpus(words: Sequence[str]) -> CorpusRequest:
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
    if {"size", "lines"} <= settings.keys():
        raise UserError(f"{called}: give size= or lines=, not both")
    size, unit = None, BYTES
    if "size" in settings:
        size = parse_size(settings["size"])
    elif "lines" in settings:
        size, unit = _parse_number(called, "lines", settings["lines"]), LINES
    if size == 0:
        raise UserError(f"{called}: draws nothing; give a size= or lines= above 0, or neither")
    hold_out = _parse_number(called, "hold-out", settings.get("hold-out", "0"))
    return CorpusRequest(called, lines, paths, size, unit, hold_out)


def _parse_number(called: str, name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise UserError(f"{called}: {name}= is a number of sentences or documents, not {text!r}")
    return int(text)


def parse_size(text: str) -> int:
    """Parse a size such as ``64GiB`` into bytes.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(B|KiB|MiB|GiB)", text)
    if not match:
        raise UserError(f"size={text}: write a number of {', '.join(_UNITS)}, as in 64GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


class Drawn(NamedTuple):
    """The parts of a document: text to train on, and text held out; often both are empty."""

    train: bytes
    valid: bytes


@dataclass
class Draw:
    """Draws from one corpus."""

    corpus: CorpusRequest
    seed: str  # random seed
    unit: str  # unit of the text held out, `documents` or `lines`
    there: Counter[str]  # number of documents, lines and bytes of the corpus
    done: Counter[str]  # the same counts of the text seen and drawn so far; updated

    def check(self) -> None:
        """Refuse, before anything is drawn, to draw more than there is.

        Raises:
            UserError: says how much there is.
        """
        corpus, there, unit = self.corpus, self.there, self.unit
        if corpus.hold_out > there[unit]:
            raise UserError(f"{corpus.name}: has {there[unit]:,} {unit}, less than hold-out=")
        rest = self._estimate_rest()
        if corpus.size is not None and corpus.size > rest:
            raise UserError(
                f"{corpus.name}: has only {rest:,.0f} {corpus.unit} to draw from, less than the "
                f"{corpus.size:,}"
            )

    def draw(self, document: bytes) -> Drawn:
        """Decide about the next document: train on it, hold it out, or leave it out."""
        corpus, done = self.corpus, self.done
        if not corpus.hold_out:
            train, valid = document, b""
        elif self.unit == DOCUMENTS:
            is_held = self._is_held_out(done[DOCUMENTS])
            train, valid = (b"", document + b"\n") if is_held else (document, b"")
        else:
            train, valid = self._split_lines(document)
        done.update(measure(document))
        if corpus.size is not None and train:
            wanted = corpus.size - done[f"train_{corpus.unit}"]
            there = self._estimate_rest() + measure(train)[corpus.unit]
            if self._random("size", done[DOCUMENTS]) * there >= wanted:
                train = b""
        done.update({f"train_{name}": value for name, value in measure(train).items()})
        return Drawn(train, valid)

    def _estimate_rest(self) -> float:
        """Estimate how much is left to train on, in the corpus' unit."""
        left = self.there[self.unit] - self.done[self.unit]
        held = self.corpus.hold_out - self.done["held_out"]
        share = 1 - held / left if left else 0
        unit = self.corpus.unit
        return (self.there[unit] - self.done[unit]) * share

    def _split_lines(self, document: bytes) -> tuple[bytes, bytes]:
        """Split a document into the lines to train on and those held out."""
        kept: list[bytes] = []
        held: list[bytes] = []
        for number, line in enumerate(document.splitlines(keepends=True), self.done[LINES]):
            (held if self._is_held_out(number) else kept).append(line)
        return b"".join(kept), b"".join(held)

    def _is_held_out(self, number: int) -> bool:
        wanted = self.corpus.hold_out - self.done["held_out"]
        is_held = self._random("hold-out", number) * (self.there[self.unit] - number) < wanted
        self.done["held_out"] += is_held
        return is_held

    def _random(self, what: str, number: int) -> float:
        """Compute the random number of a document or line, from 0 to 1."""
        text = f"{self.seed} {what} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / (1 << 64)


def measure(document: bytes) -> Counter[str]:
    """Count a document; its bytes are those in a file, with the empty line behind it."""
    if not document:
        return Counter()
    return Counter({DOCUMENTS: 1, LINES: document.count(b"\n"), BYTES: len(document) + 1})
