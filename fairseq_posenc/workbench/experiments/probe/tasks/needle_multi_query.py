"""Keys and values in a haystack: say all values (RULER's multi-query, arXiv:2404.06654).

There are four keys where the length has room for them, asked one after the other in an order of
their own. The length is that of the haystack.
"""

from __future__ import annotations

import random

from fairseq_posenc.tasks.answers import ASKS, ENDS
from fairseq_posenc.workbench.experiments.probe.haystack import KEYS, VALUES, count_needles, hide
from fairseq_posenc.workbench.experiments.probe.tasks import needle
from fairseq_posenc.workbench.experiments.probe.tasks.needle import ASK, IS

SYMBOLS = [*needle.SYMBOLS, ENDS]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make a haystack and its keys, each with its value but for the last, and that one's."""
    count = count_needles(length)
    values = dict(zip(chance.sample(KEYS, count), chance.choices(VALUES, k=count)))
    needles = [[key, IS, value] for key, value in values.items()]
    asked = chance.sample(list(values), count)
    known = [word for key in asked[:-1] for word in (key, ASKS, values[key], ENDS)]
    return [*hide(chance, needles, length), ASK, *known, asked[-1]], [values[asked[-1]]]
