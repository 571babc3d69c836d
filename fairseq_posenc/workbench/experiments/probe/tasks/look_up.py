"""Which letter stands at a place, counted from 0, that three digits tell?"""

from __future__ import annotations

import random
from string import ascii_lowercase, digits

ASK = "?"
SYMBOLS = ascii_lowercase + digits + ASK


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make letters and a place, and the letter there."""
    letters = chance.choices(ascii_lowercase, k=length)
    place = chance.randrange(length)
    return [*letters, ASK, *f"{place:03}"], [letters[place]]
