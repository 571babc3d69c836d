"""Is the number of ones even (0) or odd (1)?"""

from __future__ import annotations

import random

SYMBOLS = "01"


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make bits, and compute whether their sum is odd."""
    bits = chance.choices(SYMBOLS, k=length)
    return bits, [str(bits.count("1") % 2)]
