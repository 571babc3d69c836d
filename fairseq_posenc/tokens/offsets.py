"""Tokens that know which characters of their text they stand for.

An answer has to be a piece of the text as it was, so nothing is ever put back together from tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np


class Tokens(NamedTuple):
    """The tokens of a text, and the characters that each stands for.

    Attributes:
        ids: ``[T]``, numbers in fairseq's dictionary.
        starts: ``[T]``, each token's first character that is no leading white space.
        ends: ``[T]``, the character after its last. Tokens that share a character, such as the
            bytes of one letter, overlap; both arrays never fall.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: str, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Tokens:
        """Return tokens, given the characters of each with its leading white space."""
        spans = list(spans)
        starts = [end - (len(text[start:end].lstrip()) or end - start) for start, end in spans]
        ends = [end for _, end in spans]
        return cls(*(np.array(values, dtype=np.int64) for values in (ids, starts, ends)))

    def covering(self, start: int, end: int) -> Optional[tuple[int, int]]:
        """Return the first and the last token of the characters from start to end.

        None if all of them lie between tokens.
        """
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None


def spans_of_bytes(text: str, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return the characters of tokens that are so many bytes of the text's UTF-8, ``[T]``."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + sum((codes >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    character = np.repeat(np.arange(len(text)), widths)  # of each byte
    ends = np.cumsum(sizes)
    return list(zip(character[ends - sizes].tolist(), (character[ends - 1] + 1).tolist()))
