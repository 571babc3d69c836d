"""Say digits below 5 in their order (Deletang et al. 2023): it is enough to count them."""

from __future__ import annotations

import random

SYMBOLS = "01234"


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make digits, and the same sorted."""
    digits = chance.choices(SYMBOLS, k=length)
    return digits, sorted(digits)
