"""Keys and values in a haystack: say the value of one (RULER's multi-key, arXiv:2404.06654).

There are four keys where the length has room for them.
"""

from __future__ import annotations

import random

from fairseq_posenc.workbench.experiments.probe.haystack import KEYS, VALUES, count_needles, hide
from fairseq_posenc.workbench.experiments.probe.tasks import needle
from fairseq_posenc.workbench.experiments.probe.tasks.needle import ASK, IS

SYMBOLS = needle.SYMBOLS


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make a haystack and one of its keys, and the value."""
    count = count_needles(length)
    values = dict(zip(chance.sample(KEYS, count), chance.choices(VALUES, k=count)))
    asked = chance.choice(list(values))
    needles = [[key, IS, value] for key, value in values.items()]
    return [*hide(chance, needles, length), ASK, asked], [values[asked]]
