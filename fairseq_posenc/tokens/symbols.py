"""Symbols that can be read off a text: its words, its characters.

What fairseq does with a line of symbols between spaces, without writing that line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fairseq_posenc.tokens.numbers import Encoded, Symbols

if TYPE_CHECKING:
    from fairseq.data import Dictionary

SPACE = "▁"  # sentencepiece's sign for a space


class Splitter(Protocol):
    """Cuts lines into symbols."""

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's symbols."""
        ...


def words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Words are what stands between white space, as for fairseq."""
    return (line.split() for line in lines)


class Characters(NamedTuple):
    """Every character is a symbol; white space is none, or ``▁`` for each run of it."""

    keep_spaces: bool

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's characters."""
        between = SPACE if self.keep_spaces else ""
        return (between.join(line.split()) for line in lines)


class SymbolEncoder:
    """Looks symbols up in a dictionary.

    Args:
        split: cuts lines into symbols.
        dictionary: fairseq's.
    """

    def __init__(self, split: Splitter, dictionary: Dictionary) -> None:
        self._split = split
        self._symbols = Symbols.of(dictionary)
        self._indices = dict(dictionary.indices)

    def index(self, symbol: str) -> int:
        """Return a symbol's number, that of ``<unk>`` if the dictionary has it not."""
        return self._indices.get(symbol, self._symbols.unk)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Return the lines as numbers; see :class:`Encoder`."""
        find, unk, eos = self._indices.get, self._symbols.unk, self._symbols.eos
        encoded = [[*(find(s, unk) for s in line), eos] for line in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        total = int(sizes.sum())
        tokens = np.fromiter(chain.from_iterable(encoded), self._symbols.dtype, total)
        return Encoded(tokens, sizes)
