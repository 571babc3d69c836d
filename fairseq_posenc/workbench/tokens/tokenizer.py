"""The interface of tokenizers: lines as numbers, and tokens with their characters in the text.

SQuAD's answers have to be pieces of the original text, so no text is put together from tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol

import numpy as np

if TYPE_CHECKING:
    from fairseq.data import Dictionary  # importing it takes seconds

ENCODER_JSON, MERGES = "encoder.json", "vocab.bpe"
PIECES = "sentencepiece.model"


class Encoded(NamedTuple):
    """Lines as numbers, each with ``</s>`` at its end."""

    tokens: np.ndarray  # tokens of all lines, one after the other, `[T]`
    sizes: np.ndarray  # tokens of each line, `</s>` included, `[N]`, int32


class Encoder(Protocol):
    """Turns lines without white space at their ends into numbers; "" is ``</s>`` alone."""

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines as numbers of the dictionary."""
        ...


class Symbols(NamedTuple):
    """The special symbols of a dictionary, and its size."""

    bos: int
    pad: int
    eos: int
    unk: int
    size: int

    @classmethod
    def from_dictionary(cls, dictionary: Dictionary) -> Symbols:
        """Take the symbols of a fairseq dictionary."""
        return cls(
            dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), len(dictionary)
        )

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers that fairseq stores: uint16 up to 65,499 symbols."""
        from fairseq.data.indexed_dataset import best_fitting_int_dtype

        return np.dtype(best_fitting_int_dtype(self.size))


class Tokens(NamedTuple):
    """The tokens of a text with the characters of each."""

    ids: np.ndarray  # numbers in the fairseq dictionary, `[T]`
    starts: np.ndarray  # first character after leading white space, `[T]`, ascending
    # character after the last, `[T]`, ascending. Tokens that share a character, such as the bytes
    # of one letter, overlap
    ends: np.ndarray

    @classmethod
    def from_spans(cls, text: str, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Tokens:
        """Build tokens from the span of each, which includes its leading white space."""
        spans = list(spans)
        starts = [end - (len(text[start:end].lstrip()) or end - start) for start, end in spans]
        ends = [end for _, end in spans]
        return cls(*(np.array(values, dtype=np.int64) for values in (ids, starts, ends)))

    def covering(self, start: int, end: int) -> Optional[tuple[int, int]]:
        """Find the first and the last token of a span; None if it lies between tokens."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None


def spans_of_bytes(text: str, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Compute the character spans of tokens from their sizes in bytes of UTF-8, ``[T]``."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + sum((codes >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    character = np.repeat(np.arange(len(text)), widths)  # of each byte
    ends = np.cumsum(sizes)
    return list(zip(character[ends - sizes].tolist(), (character[ends - 1] + 1).tolist()))


class Tokenizer(Encoder, Protocol):
    """An encoder that also knows the characters of each token."""

    def tokens(self, text: str) -> Tokens:
        """Tokenize a text."""
        ...
