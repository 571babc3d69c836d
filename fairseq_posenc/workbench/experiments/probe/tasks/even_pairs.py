"""Is the number of neighbours that differ even (1) or odd (0)? (Deletang et al. 2023)."""

from __future__ import annotations

import random

SYMBOLS = "01"


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make bits, and compare the first with the last, which says the same."""
    bits = chance.choices(SYMBOLS, k=length)
    return bits, [str(int(bits[0] == bits[-1]))]
