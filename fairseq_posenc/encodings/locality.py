"""Limits of the keys that a query sees, as data: windows and segments."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import NamedTuple

from torch import Tensor


class Locality(NamedTuple):
    """The keys that a query may see, beside what directions and padding say.

    Attributes:
        window: W. A query with a direction sees W keys, itself among them; one without sees keys
            at most W // 2 away. None for no limit.
        segments: ``(B or 1, S)`` of int64; a query sees the keys that have its number. None for no
            limit.
        documents: whether segments are documents, each with a first token of its own.
        longest: the most tokens of a segment, if that is known.
        first_keys: ``(B or 1, S)`` of bool, True for keys that no window hides. None for none.
    """

    window: int | None = None
    segments: Tensor | None = None
    documents: bool = False
    longest: int | None = None
    first_keys: Tensor | None = None

    @property
    def limits(self) -> bool:
        """Whether a query may not see every key that its direction allows."""
        return self.window is not None or self.segments is not None

    def reach(self, direction: str) -> int | None:
        """Compute the largest distance to a visible key, or None for no limit."""
        if self.window is None:
            return None
        return self.window // 2 if direction == "both" else self.window - 1

    def needed_keys(self) -> int | None:
        """Count the keys that later queries of a causal model may see; None for all."""
        window = self.window if self.first_keys is None else None
        known = [size for size in (window, self.longest) if size is not None]
        return min(known) - 1 if known else None

    def __and__(self, other: Locality) -> Locality:
        """Limit the keys by both."""
        limited = [limits for limits in (self, other) if limits.window is not None]
        windows = [limits.window for limits in limited if limits.window is not None]
        marks = [limits.first_keys for limits in limited if limits.first_keys is not None]
        # A key that only one of two windows leaves visible is hidden by the other.
        has_first = bool(marks) and len(marks) == len(limited)
        longest = [side.longest for side in (self, other) if side.longest is not None]
        ours, theirs = self.segments, other.segments
        if ours is not None and theirs is not None:
            ours = ours * (theirs.amax() + 1) + theirs  # one number for each pair of numbers
        segments = theirs if ours is None else ours
        return Locality(
            min(windows, default=None),
            segments,
            self.documents or other.documents,
            min(longest, default=None),
            reduce(and_, marks) if has_first else None,
        )
