"""Say the letters from the last to the first."""

from __future__ import annotations

import random
from string import ascii_lowercase as SYMBOLS


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make letters, and the same backwards."""
    letters = chance.choices(SYMBOLS, k=length)
    return letters, letters[::-1]
