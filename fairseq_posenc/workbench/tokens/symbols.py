"""Encodes words or characters as the symbols of a dictionary, as fairseq does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.tokens.tokenizer import Encoded, Symbols

if TYPE_CHECKING:
    from fairseq.data import Dictionary

SPACE = "▁"  # sentencepiece's symbol of a space
Splitter = Callable[[Sequence[str]], Iterable[Sequence[str]]]  # splits lines into symbols


def words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Split each line at white space, as fairseq does."""
    return (line.split() for line in lines)


def characters(lines: Sequence[str], between: str) -> Iterable[Sequence[str]]:
    """Split each line into characters; white space becomes ``between``, a character or nothing."""
    return (between.join(line.split()) for line in lines)


class SymbolEncoder:
    """Encodes lines: splits them into symbols, and looks these up in a dictionary."""

    def __init__(self, split: Splitter, dictionary: Dictionary) -> None:
        self._split = split
        self._symbols = Symbols.from_dictionary(dictionary)
        self._indices = dict(dictionary.indices)

    def index(self, symbol: str) -> int:
        """Look up the id of a symbol; that of ``<unk>`` if the dictionary lacks it."""
        return self._indices.get(symbol, self._symbols.unk)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that neither begin nor end with white space."""
        find, unk, eos = self._indices.get, self._symbols.unk, self._symbols.eos
        encoded = [[*(find(s, unk) for s in line), eos] for line in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        total = int(sizes.sum())
        tokens = np.fromiter(chain.from_iterable(encoded), self._symbols.dtype, total)
        return Encoded(tokens, sizes)


def warn_of_unknown(text: str, unknown: int, tokens: int) -> None:
    """Print a warning if more than half of a text's tokens are ``<unk>``.

    Args:
        text: name of the text.
        unknown: number of its ``<unk>``; also those in lines that were left out, if there are any.
        tokens: number of its tokens that are written, without special symbols.
    """
    if 2 * unknown > tokens:
        say(
            f"warning: {text}: {unknown:,} of {max(unknown, tokens):,} tokens are <unk>; is the "
            "dictionary that of this text and these tokens?"
        )
