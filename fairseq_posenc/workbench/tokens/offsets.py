"""Tokens with character offsets.

An answer has to be a piece of the original text, so no text is ever put together from tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np


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
