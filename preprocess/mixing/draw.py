"""Samples documents, and text to hold out, at random.

Both use Knuth's selection sampling (The Art of Computer Programming, 3.4.2, algorithm S): to choose
n of N items, the next item is chosen with probability (n - chosen) / (N - seen). All items have the
same chance, exactly n are chosen, and nothing is kept in memory. For a size in bytes or lines, n, N
and the counts are in this unit, and documents are chosen whole: the size is met to within one
document. The random number is a hash of the seed and the number of the document or line.

A document is text in which every line ends with a line feed; an empty line follows it in a file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
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
    """A corpus to sample from: the parsed ``--corpus``."""

    option: str  # as given, for messages
    format: LineFormat  # format of its files
    paths: list[str]  # files and folders
    size: Optional[int]  # amount to sample, in `unit`; None for all
    unit: str  # `bytes`, or `lines`, which are sentences with `--sentences`
    hold_out: int  # number of lines or documents for validation


def parse_corpus(words: Sequence[str]) -> CorpusRequest:
    """Parse ``FORMAT PATH ... [SETTING=VALUE ...]``.

    Raises:
        UserError: the words have another form.
    """
    settings: dict[str, str] = {}
    paths = []
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals and name in _SETTINGS:
            settings[name] = value
        else:
            paths.append(word)
    option = f"--corpus {' '.join(words)}"
    if words[0] not in _FORMATS or not paths:
        raise UserError(f"{option}: give a format ({', '.join(_FORMATS)}), then files or folders")
    line_format = _FORMATS[words[0]]
    if isinstance(line_format, JsonField):
        line_format = JsonField(settings.get("field", "text"), parse_where(settings.get("where")))
    elif settings.keys() & {"field", "where"}:
        raise UserError(f"{option}: field= and where= are for json")
    if {"size", "lines"} <= settings.keys():
        raise UserError(f"{option}: give size= or lines=, not both")
    size = None
    if "size" in settings:
        size = parse_size(settings["size"])
    elif "lines" in settings:
        size = _parse_number(option, "lines", settings["lines"])
    if size == 0:
        raise UserError(f"{option}: draws nothing; give a size= or lines= above 0, or neither")
    unit = LINES if "lines" in settings else BYTES
    hold_out = _parse_number(option, "hold-out", settings.get("hold-out", "0"))
    return CorpusRequest(option, line_format, paths, size, unit, hold_out)


def _parse_number(option: str, name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise UserError(f"{option}: {name}= is a whole number of lines or documents, not {text!r}")
    return int(text)


def parse_size(text: str) -> int:
    """Parse a size such as ``64GiB`` into bytes.

    Raises:
        UserError: the text is not a size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(B|KiB|MiB|GiB)", text)
    if not match:
        raise UserError(f"size={text}: write a number of {', '.join(_UNITS)}, as in 64GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


class Sampler:
    """Samples from one corpus.

    Args:
        corpus: how much to sample, and to hold out.
        seed: seed of the random numbers.
        hold_out_unit: unit of the text held out, ``documents`` or ``lines``.
        totals: ``documents``, ``lines`` and ``bytes`` of the corpus, if sampling needs them.

    Raises:
        UserError: the corpus has less than ``corpus`` wants.
    """

    def __init__(
        self, corpus: CorpusRequest, seed: str, hold_out_unit: str, totals: Counter[str]
    ) -> None:
        self.corpus, self.seed = corpus, seed
        self.hold_out_unit, self.totals = hold_out_unit, totals
        # `documents`, `lines` and `bytes` read so far, with `train_` before them those to train on;
        # and `held_out`, in `hold_out_unit`.
        self.counts: Counter[str] = Counter()
        available = totals[hold_out_unit]
        if corpus.hold_out > available:
            raise UserError(
                f"{corpus.option}: has {available:,} {hold_out_unit}, less than hold-out="
            )
        rest = self._estimate_rest()
        if corpus.size is not None and corpus.size > rest:
            raise UserError(
                f"{corpus.option}: has only {rest:,.0f} {corpus.unit} to draw from, less than the "
                f"{corpus.size:,}"
            )

    def sample(self, document: bytes) -> tuple[bytes, bytes]:
        """Decide about the next document: return its text to train on, and its text held out."""
        corpus = self.corpus
        counts = self.counts
        train = document
        valid = b""
        if corpus.hold_out and self.hold_out_unit == LINES:
            train, valid = self._split_lines(document)
        elif corpus.hold_out and self._choose_held_out(counts[DOCUMENTS]):
            train = b""
            valid = document + b"\n"
        counts.update(measure(document))
        if corpus.size is not None and train:
            wanted = corpus.size - counts[f"train_{corpus.unit}"]
            rest = measure(train)[corpus.unit] + self._estimate_rest()  # this document, and later
            if self._random("size", counts[DOCUMENTS]) * rest >= wanted:
                train = b""
        counts.update({f"train_{name}": value for name, value in measure(train).items()})
        return train, valid

    def _estimate_rest(self) -> float:
        """Estimate how much text to train on follows what is counted, in the unit of the size.

        Of the text to hold out from it, only the expected share is known.
        """
        rest = self.totals[self.hold_out_unit] - self.counts[self.hold_out_unit]
        still_to_hold = self.corpus.hold_out - self.counts["held_out"]
        train_share = 1 - still_to_hold / rest if rest else 0
        unit = self.corpus.unit
        return (self.totals[unit] - self.counts[unit]) * train_share

    def _split_lines(self, document: bytes) -> tuple[bytes, bytes]:
        """Split a document into the lines to train on and those held out."""
        train: list[bytes] = []
        valid: list[bytes] = []
        for number, line in enumerate(document.splitlines(keepends=True), self.counts[LINES]):
            part = valid if self._choose_held_out(number) else train
            part.append(line)
        return b"".join(train), b"".join(valid)

    def _choose_held_out(self, number: int) -> bool:
        """Decide whether to hold out a document or line by its number, and count it if so."""
        still_to_hold = self.corpus.hold_out - self.counts["held_out"]
        rest = self.totals[self.hold_out_unit] - number
        is_held = self._random("hold-out", number) * rest < still_to_hold
        self.counts["held_out"] += is_held
        return is_held

    def _random(self, purpose: str, number: int) -> float:
        """Compute the random number of a document or line, from 0 to 1."""
        text = f"{self.seed} {purpose} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / (1 << 64)


def measure(document: bytes) -> Counter[str]:
    """Count a document; its bytes include the empty line that follows it in a file."""
    if not document:
        return Counter()
    return Counter({DOCUMENTS: 1, LINES: document.count(b"\n"), BYTES: len(document) + 1})
