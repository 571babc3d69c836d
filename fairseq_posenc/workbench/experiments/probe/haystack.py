"""Noise in which a few words are hidden, as the tasks of RULER do (arXiv:2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Optional

KEYS = [f"k{number}" for number in range(64)]
VALUES = [f"v{number}" for number in range(64)]
NOISE = [f"n{number}" for number in range(32)]
NEEDLE = 3  # words, as in `k7 is v2`


def count_needles(length: int, most: int = 4) -> int:
    """Count the needles that a length has room for, at least one and at most ``most``."""
    return min(most, max(1, length // NEEDLE))


def hide(
    chance: random.Random,
    needles: Sequence[Sequence[str]],
    length: int,
    depth: Optional[float] = None,
) -> list[str]:
    """Put needles, in their order, between words of noise.

    Args:
        chance: source of randomness.
        needles: the words of each.
        length: of the whole, in words.
        depth: where all of them stand, from 0, the beginning, to 1; by default anywhere.
    """
    noise = chance.choices(NOISE, k=max(0, length - sum(map(len, needles))))
    places = sorted(chance.randint(0, len(noise)) for _ in needles)
    if depth is not None:
        places = [round(depth * len(noise))] * len(needles)
    words, start = [], 0
    for place, needle in zip(places, needles):
        words += [*noise[start:place], *needle]
        start = place
    return words + noise[start:]
