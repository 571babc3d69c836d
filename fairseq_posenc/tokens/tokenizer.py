"""Defines the interface of tokenizers: token ids of lines, and the characters of each token.

SQuAD's answers must be parts of the original text, so tokens know their characters in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol

import numpy as np

if TYPE_CHECKING:
    from fairseq.data import Dictionary  # importing it takes seconds
    from typing_extensions import Self

ENCODER_JSON, MERGES = "encoder.json", "vocab.bpe"
PIECES = "sentencepiece.model"


class Encoded(NamedTuple):
    """Encoded lines, each of which ends with ``</s>``."""

    tokens: np.ndarray  # token ids of all lines, one after the other, `[T]`
    sizes: np.ndarray  # number of tokens of each of N lines, with `</s>`, `[N]`, int32


class Encoder(Protocol):
    """Encodes lines that neither begin nor end with white space; "" becomes ``</s>`` alone."""

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines as token ids of the dictionary."""


def token_dtype(dictionary: Dictionary) -> np.dtype:
    """Choose the type in which fairseq stores token ids: uint16 for up to 65,499 symbols."""
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    return np.dtype(best_fitting_int_dtype(len(dictionary)))


class TextTokens(NamedTuple):
    """The tokens of a text and their characters, ``text[start:end]``; a letter's bytes share it."""

    ids: np.ndarray  # token ids of the fairseq dictionary, `[T]`
    starts: np.ndarray  # index of the first character after leading white space, `[T]`, ascending
    ends: np.ndarray  # index after the last character, `[T]`, ascending

    @classmethod
    def from_spans(cls, text: str, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Self:
        """Build tokens from their spans, which include leading white space."""
        starts, ends = [], []
        for start, end in spans:
            visible = len(text[start:end].lstrip())
            starts.append(end - visible if visible else start)  # white space alone is kept
            ends.append(end)
        return cls(np.array(ids, np.int64), np.array(starts, np.int64), np.array(ends, np.int64))

    def covering(self, start: int, end: int) -> Optional[tuple[int, int]]:
        """Find the first and the last token that overlap a span of characters; None without any."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None


def spans_of_bytes(text: str, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Compute the character spans of tokens from their sizes in UTF-8 bytes, ``[T]``."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    # UTF-8 needs a second, third and fourth byte from these code points on.
    widths = 1 + sum((codes >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    character = np.repeat(np.arange(len(text)), widths)  # index of the character of each byte
    ends = np.cumsum(sizes)
    return list(zip(character[ends - sizes].tolist(), (character[ends - 1] + 1).tolist()))


class Tokenizer(Encoder, Protocol):
    """An encoder that also knows the characters of each token."""

    def tokens(self, text: str) -> TextTokens:
        """Tokenize a text."""
