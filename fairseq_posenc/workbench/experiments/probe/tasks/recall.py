"""Pairs of keys and values, then some keys: say their values (multi-query associative recall).

The length is that of all pairs; at most four keys are asked for.
"""

from __future__ import annotations

import random
from string import ascii_lowercase

_QUERIES = 4
_KEYS = [f"k{number}" for number in range(256)]
ASK = "?"
SYMBOLS = [*_KEYS, *ascii_lowercase, ASK]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make pairs of different keys and any values, then keys, and the values of these."""
    keys = chance.sample(_KEYS, min(max(1, length // 2), len(_KEYS)))
    values = dict(zip(keys, chance.choices(ascii_lowercase, k=len(keys))))
    asked = chance.sample(keys, min(_QUERIES, len(keys)))
    pairs = [word for pair in values.items() for word in pair]
    return [*pairs, ASK, *asked], [values[key] for key in asked]
