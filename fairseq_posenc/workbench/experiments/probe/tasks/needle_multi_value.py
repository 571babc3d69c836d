"""A key with several values in a haystack: say them all (RULER's multi-value, arXiv:2404.06654).

There are four values where the length has room for them; the answer has them in their order.
"""

from __future__ import annotations

import random

from fairseq_posenc.workbench.experiments.probe.haystack import KEYS, VALUES, count_needles, hide
from fairseq_posenc.workbench.experiments.probe.tasks import needle
from fairseq_posenc.workbench.experiments.probe.tasks.needle import ASK, IS

SYMBOLS = needle.SYMBOLS


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make a haystack and the key, and its values."""
    count = count_needles(length)
    key, values = chance.choice(KEYS), chance.sample(VALUES, count)
    needles = [[key, IS, value] for value in values]
    return [*hide(chance, needles, length), ASK, key], values
