"""Encodes text by a dictionary of words, characters or pieces: its *symbols*, in fairseq's words.

A splitter turns lines into symbols ("a bee" into "a", "bee"), a dictionary these into token ids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from fairseq_posenc.errors import printable_lines
from fairseq_posenc.tokens.tokenizer import Encoded, token_dtype

if TYPE_CHECKING:
    from fairseq.data import Dictionary

SPACE = "▁"  # sentencepiece's symbol of a space
# Splits lines into symbols, which the caller reads once: they may be an iterator.
Splitter = Callable[[Sequence[str]], Iterable[Sequence[str]]]


def split_words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Split each line at white space, as fairseq does."""
    return (line.split() for line in lines)


def split_characters(lines: Sequence[str], between: str) -> Iterable[Sequence[str]]:
    """Split each line into characters; white space becomes ``between``, a character or nothing."""
    return (between.join(line.split()) for line in lines)


class SymbolEncoder:
    """Encodes lines: splits them into symbols, and looks these up in a dictionary."""

    def __init__(self, split: Splitter, dictionary: Dictionary) -> None:
        self._split = split
        self._indices = dict(dictionary.indices)
        self._unk, self._eos = dictionary.unk(), dictionary.eos()
        self._dtype = token_dtype(dictionary)

    def index(self, symbol: str) -> int:
        """Look up the id of a symbol; that of ``<unk>`` if the dictionary lacks it."""
        return self._indices.get(symbol, self._unk)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that neither begin nor end with white space."""
        find, unk = self._indices.get, repeat(self._unk)
        encoded = [[*map(find, symbols, unk), self._eos] for symbols in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        tokens = np.fromiter(chain.from_iterable(encoded), self._dtype, int(sizes.sum()))
        return Encoded(tokens, sizes)


def warn_of_unknown(text: str, unknown: int, tokens: int) -> None:
    """Print a warning if more than half of a text's tokens are ``<unk>``.

    Args:
        text: name of the text.
        unknown: number of its ``<unk>``, also in parts that were left out, so perhaps the larger.
        tokens: number of its tokens that were written, without special symbols.
    """
    if 2 * unknown > tokens:
        message = (
            f"warning: {text}: {unknown:,} of {max(unknown, tokens):,} tokens are <unk>; is the "
            "dictionary that of this text and these tokens?"
        )
        print(printable_lines(message), file=sys.stderr)
