"""Say the letters in the order of the alphabet."""

from __future__ import annotations

import random
from string import ascii_lowercase as SYMBOLS


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make letters, and the same sorted."""
    letters = chance.choices(SYMBOLS, k=length)
    return letters, sorted(letters)
