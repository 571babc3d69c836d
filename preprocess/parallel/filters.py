"""Filters training pairs; validation and test sets are never filtered."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Optional

Pieces = list[list[int]]


class Limits(NamedTuple):
    """Limits of a training pair.

    Attributes:
        max_length: maximum pieces of either side.
        max_ratio: maximum ratio of the longer side to the shorter one.
    """

    max_length: int
    max_ratio: float

    def reason(self, source: list[int], target: list[int]) -> Optional[str]:
        """Name the reason to drop a pair; None keeps it."""
        shorter, longer = sorted((len(source), len(target)))
        if not shorter:
            return "empty"
        if longer > self.max_length:
            return "too long"
        if longer > self.max_ratio * shorter:
            return "lengths too different"
        return None


def filter_pairs(
    source: Pieces, target: Pieces, limits: Limits
) -> tuple[Pieces, Pieces, dict[str, int]]:
    """Filter pairs; return both sides of those kept, and counts of those dropped by reason."""
    reasons = [limits.reason(*pair) for pair in zip(source, target)]
    dropped = Counter({"empty": 0, "too long": 0, "lengths too different": 0})
    dropped.update(reason for reason in reasons if reason)
    kept = [index for index, reason in enumerate(reasons) if reason is None]
    return [source[index] for index in kept], [target[index] for index in kept], dict(dropped)
