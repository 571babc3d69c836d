"""A word twice, in which one letter of the second is missing: which? (Ruoss et al. 2023).

The length is that of both words together.
"""

from __future__ import annotations

import random
from string import ascii_lowercase

MISSING = "_"
SYMBOLS = ascii_lowercase + MISSING


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make a word and the word with a gap, and the letter that belongs there."""
    word = chance.choices(ascii_lowercase, k=max(1, length // 2))
    gap = chance.randrange(len(word))
    return [*word, *word[:gap], MISSING, *word[gap + 1 :]], [word[gap]]
