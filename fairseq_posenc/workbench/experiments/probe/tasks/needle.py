"""A key and its value in a haystack: say the value (RULER's single needle, arXiv:2404.06654)."""

from __future__ import annotations

import random
from typing import Optional

from fairseq_posenc.workbench.experiments.probe.haystack import KEYS, NOISE, VALUES, hide

IS, ASK = "is", "?"
SYMBOLS = [*KEYS, *VALUES, *NOISE, IS, ASK]


def example(
    chance: random.Random, length: int, depth: Optional[float] = None
) -> tuple[list[str], list[str]]:
    """Make a haystack and the key, and the value."""
    key, value = chance.choice(KEYS), chance.choice(VALUES)
    return [*hide(chance, [[key, IS, value]], length, depth), ASK, key], [value]
