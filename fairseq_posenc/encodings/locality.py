"""Limits of the keys that a query sees, as data: windows, and segments (chunks, documents)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NeededKeys(NamedTuple):
    """The keys that later queries of a causal model may see; a cache may drop all others.

    With ``window(size=4,first=1)`` these are the last 3 keys and key 0.

    Attributes:
        last: the number of last keys; None for all.
        first: the indices of further keys, int64 ``(n,)`` on the CPU; None for no others.
    """

    last: int | None
    first: Tensor | None = None


class Locality(NamedTuple):
    """Limits of the keys that a query may see, in addition to directions and padding.

    >>> Locality(window=4).reach("lr"), Locality(window=4).reach("both")  # farthest visible key
    (3, 2)

    Attributes:
        window: W. A query with a direction sees W keys, including its own; a query without one
            sees keys at most W // 2 away. None for no limit.
        segments: the number of each token's segment, ``(B or 1, S)`` of int64; a query sees the
            keys of its segment. None for no limit.
        documents: whether segments are documents; then a reset is for the first token of each.
        longest: the largest number of tokens in a segment, if it is known.
        first_keys: ``(B or 1, S)`` of bool, True for keys that no window hides. None for none.
        prefill: whether later tokens, generated one by one, have no window.
    """

    window: int | None = None
    segments: Tensor | None = None
    documents: bool = False
    longest: int | None = None
    first_keys: Tensor | None = None
    prefill: bool = False

    @property
    def limits(self) -> bool:
        """Whether a query may not see every key that its direction allows."""
        return self.window is not None or self.segments is not None

    def reach(self, direction: str) -> int | None:
        """Compute the largest distance to a visible key; None for no limit."""
        if self.window is None:
            return None
        return self.window // 2 if direction == "both" else self.window - 1

    def needed_keys(self, queries: int = 0) -> NeededKeys:
        """Find the keys that a cache must hold for the next tokens of a causal model.

        A compiled graph cannot read how many first keys there are, so with these it needs all keys.

        Args:
            queries: how many of the tokens in ``first_keys`` and ``segments``, the last ones, are
                new, so that the cache does not hold them yet.
        """
        if self.prefill:  # the next tokens are generated, and have no window
            return Locality(segments=self.segments, longest=self.longest).needed_keys()
        sizes = [size for size in (self.window, self.longest) if size is not None]
        # The last key stays even if no query sees it: sums of decay continue from it.
        last = max(min(sizes) - 1, 1) if sizes else None
        if self.first_keys is None or last is None:
            return NeededKeys(last)
        if torch.compiler.is_compiling():
            return NeededKeys(None)
        held = self.first_keys.size(1) - queries
        is_first = self.first_keys[:, :held]  # [B or 1, held]
        if self.segments is not None:
            # An unknown token continues the last segment, or begins one without these keys.
            open_segments = self.segments[:, -max(queries, 1) :]  # [B or 1, queries or 1]
            is_open = self.segments[:, :held, None].eq(open_segments[:, None])
            is_first = is_first & is_open.any(2)
        return NeededKeys(last, is_first.any(0).nonzero()[:, 0].cpu())

    def __and__(self, other: Locality) -> Locality:
        """Combine two limits: a key is visible if both allow it. One may have first keys."""
        segments = other.segments if self.segments is None else self.segments
        if self.segments is not None and other.segments is not None:
            # A number for each pair of segments.
            segments = self.segments * (other.segments.amax() + 1) + other.segments
        return Locality(
            window=min((x for x in (self.window, other.window) if x), default=None),
            segments=segments,
            documents=self.documents or other.documents,
            longest=min((x for x in (self.longest, other.longest) if x), default=None),
            first_keys=other.first_keys if self.first_keys is None else self.first_keys,
            prefill=self.prefill or other.prefill,
        )
