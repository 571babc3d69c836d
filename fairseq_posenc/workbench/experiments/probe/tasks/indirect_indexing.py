"""Which word stands some places after, or before, a given one? (PoPE, arXiv:2509.10534).

All words of a question differ; the last two are the given one and the shift.
"""

from __future__ import annotations

import random

_FARTHEST = 9
WORDS = [f"w{number}" for number in range(512)]
SHIFTS = [f"{shift:+}" for shift in range(-_FARTHEST, _FARTHEST + 1) if shift]
ASK = "?"
SYMBOLS = [*WORDS, *SHIFTS, ASK]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make words, one of them and a shift, and the word that many places after it."""
    words = chance.sample(WORDS, max(2, length))
    place = chance.randrange(len(words))
    near = range(max(0, place - _FARTHEST), min(len(words), place + _FARTHEST + 1))
    found = chance.choice([other for other in near if other != place])
    return [*words, ASK, words[place], f"{found - place:+}"], [words[found]]
