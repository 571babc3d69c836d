"""What bit was written last? (Liu et al. 2023, arXiv:2306.00946).

Instructions come with a bit each: ``w`` writes it, ``i`` is to be ignored, ``r`` reads what was
written last. The first one writes, the last one reads, and its bit is the answer.
"""

from __future__ import annotations

import random

SYMBOLS = "wir01"
_WEIGHTS = (1, 8, 1)  # of writing, ignoring and reading: few writes are far back


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make instructions with their bits, the last bit missing, and that bit."""
    between = chance.choices("wir", _WEIGHTS, k=max(0, (length - 3) // 2))
    words, written = [], ""
    for instruction in ["w", *between]:
        bit = written if instruction == "r" else chance.choice("01")
        written = bit if instruction == "w" else written
        words += [instruction, bit]
    return [*words, "r"], [written]
