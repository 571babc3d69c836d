"""Words and characters as symbols, encoded as fairseq encodes a line of symbols between spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.tokens.tokenizer import Encoded, Symbols

if TYPE_CHECKING:
    from fairseq.data import Dictionary

SPACE = "▁"  # sentencepiece's sign for a space, for `between`


Splitter = Callable[[Sequence[str]], Iterable[Sequence[str]]]  # cuts lines into symbols


def words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Cut each line at its white space, as fairseq does."""
    return (line.split() for line in lines)


def characters(lines: Sequence[str], between: str) -> Iterable[Sequence[str]]:
    """Cut each line into characters; a run of white space becomes ``between``."""
    return (between.join(line.split()) for line in lines)


class SymbolEncoder:
    """Encodes lines: ``split`` cuts them into symbols, which are looked up in a dictionary."""

    def __init__(self, split: Splitter, dictionary: Dictionary) -> None:
        self._split = split
        self._symbols = Symbols.from_dictionary(dictionary)
        self._indices = dict(dictionary.indices)

    def index(self, symbol: str) -> int:
        """Look up a symbol's number, that of ``<unk>`` if the dictionary does not have it."""
        return self._indices.get(symbol, self._symbols.unk)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines without white space at their ends."""
        find, unk, eos = self._indices.get, self._symbols.unk, self._symbols.eos
        encoded = [[*(find(s, unk) for s in line), eos] for line in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        total = int(sizes.sum())
        tokens = np.fromiter(chain.from_iterable(encoded), self._symbols.dtype, total)
        return Encoded(tokens, sizes)


def warn_of_unknown(text: str, unknown: int, words: int) -> None:
    """Print a warning if more than half of the words, or other tokens, of a text are ``<unk>``."""
    if 2 * unknown > words:
        say(
            f"warning: {text}: {unknown:,} of {max(unknown, words):,} tokens are <unk>; is the "
            "dictionary that of this text and these tokens?"
        )
