"""Where on a circle of five places do steps end? (Deletang et al. 2023): stay, + 1 or - 1."""

from __future__ import annotations

import random

_PLACES = 5
STEPS = {"stay": 0, "right": 1, "left": -1}
SYMBOLS = [*STEPS, *map(str, range(_PLACES))]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make steps from place 0, and the place where they end."""
    steps = chance.choices(list(STEPS), k=length)
    return steps, [str(sum(map(STEPS.__getitem__, steps)) % _PLACES)]
