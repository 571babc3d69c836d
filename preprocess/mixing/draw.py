"""Which documents are taken and which sentences held out: by chance, but exactly so many.

Both are Knuth's selection sampling (The Art of Computer Programming, 3.4.2, algorithm S): what
stands next is chosen with the probability `still wanted / still there`. Each has the same chance,
the number comes out exactly, and nothing has to be kept in memory. The chance itself is a hash of
the seed and of the number of what stands next, so that it does not matter where reading began.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

from fairseq_posenc.errors import UserError

from .corpora import BYTES, DOCUMENTS, LINES, Corpus


class Drawn(NamedTuple):
    """The parts of a document: text to train on, and text held out; often both are empty."""

    train: bytes
    valid: bytes


def size_of(document: bytes) -> int:
    """Return the bytes that a document has in a file, with the empty line behind it."""
    return len(document) + 1 if document else 0


class Draw:
    """Draws from one corpus.

    Args:
        corpus: what is wanted.
        seed: of the chance.
        unit: what is held out, ``documents`` or ``lines``.
        there: how many documents, lines and bytes the corpus has.
        done: what was seen and drawn so far; counted on.
    """

    def __init__(
        self, corpus: Corpus, seed: str, unit: str, there: Counter[str], done: Counter[str]
    ) -> None:
        self._corpus, self._seed, self._unit, self._there = corpus, seed, unit, there
        self.done = done

    def check(self) -> None:
        """Refuse, before anything is drawn, to draw more than there is.

        Raises:
            UserError: says how much there is.
        """
        corpus, there, unit = self._corpus, self._there, self._unit
        if corpus.hold_out > there[unit]:
            raise UserError(f"{corpus.name}: has {there[unit]:,} {unit}, less than hold-out=")
        if corpus.size is not None and corpus.size > self._rest():
            raise UserError(
                f"{corpus.name}: has only {self._rest():,.0f} {corpus.unit} to draw from, less "
                f"than the {corpus.size:,}"
            )

    def draw(self, document: bytes) -> Drawn:
        """Decide about the next document: train on it, hold it out, or leave it out."""
        corpus, done = self._corpus, self.done
        if not corpus.hold_out:
            train, valid = document, b""
        elif self._unit == DOCUMENTS:
            is_held = self._is_held_out(done[DOCUMENTS])
            train, valid = (b"", document + b"\n") if is_held else (document, b"")
        else:
            train, valid = self._without_lines(document)
        done.update(measure(document))
        if corpus.size is not None and train:
            wanted = corpus.size - done[f"train_{corpus.unit}"]
            there = self._rest() + measure(train)[corpus.unit]
            if self._chance("size", done[DOCUMENTS]) * there >= wanted:
                train = b""
        done.update({f"train_{name}": value for name, value in measure(train).items()})
        return Drawn(train, valid)

    def _rest(self) -> float:
        """Estimate how much is left to train on, in the corpus' unit."""
        left = self._there[self._unit] - self.done[self._unit]
        held = self._corpus.hold_out - self.done["held_out"]
        share = 1 - held / left if left else 0
        unit = self._corpus.unit
        return (self._there[unit] - self.done[unit]) * share

    def _without_lines(self, document: bytes) -> tuple[bytes, bytes]:
        kept: list[bytes] = []
        held: list[bytes] = []
        for number, line in enumerate(document.splitlines(keepends=True), self.done[LINES]):
            (held if self._is_held_out(number) else kept).append(line)
        return b"".join(kept), b"".join(held)

    def _is_held_out(self, number: int) -> bool:
        wanted = self._corpus.hold_out - self.done["held_out"]
        is_held = self._chance("hold-out", number) * (self._there[self._unit] - number) < wanted
        self.done["held_out"] += is_held
        return is_held

    def _chance(self, what: str, number: int) -> float:
        text = f"{self._seed} {what} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / (1 << 64)


def measure(document: bytes) -> Counter[str]:
    """Return the counts of a document, nothing of an empty one."""
    if not document:
        return Counter()
    return Counter({DOCUMENTS: 1, LINES: document.count(b"\n"), BYTES: size_of(document)})
