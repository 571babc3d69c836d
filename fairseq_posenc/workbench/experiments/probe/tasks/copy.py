"""Say the letters again."""

from __future__ import annotations

import random
from string import ascii_lowercase as SYMBOLS


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make letters, and the same."""
    letters = chance.choices(SYMBOLS, k=length)
    return letters, letters
