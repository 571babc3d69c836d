"""Which variables have a value, given to one and passed on to others? (RULER, arXiv:2404.06654).

Assignments, each of a variable and its value or another variable, stand among words of noise. The
length is that of all; a chain has four hops where there is room. The answer names the variables in
the order of their assignments.
"""

from __future__ import annotations

import random

from fairseq_posenc.workbench.experiments.probe.haystack import NOISE, VALUES, count_needles, hide

_HOPS = 4
VARIABLES = [f"x{number}" for number in range(64)]
ASSIGN, ASK = ":=", "?"
SYMBOLS = [*VARIABLES, *VALUES, *NOISE, ASSIGN, ASK]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make assignments among noise, and the variables that have the value."""
    names = chance.sample(VARIABLES, count_needles(length, _HOPS + 1))
    value = chance.choice(VALUES)
    chain = [[name, ASSIGN, source] for name, source in zip(names, [value, *names])]
    return [*hide(chance, chain, length), ASK, value], names
