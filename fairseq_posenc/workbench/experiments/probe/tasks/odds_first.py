"""Say the bits at odd places, counted from 1, then those at even ones (Deletang et al. 2023)."""

from __future__ import annotations

import random

SYMBOLS = "01"


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make bits, and the same in the other order."""
    bits = chance.choices(SYMBOLS, k=length)
    return bits, bits[::2] + bits[1::2]
