"""Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927), as zoology makes it.

A question begins with pairs of a key and its value, one for each eight words. Then come places of
four words: of each key stands its own, drawn by a power law that prefers the first ones, with
``=``, the value and ``;``. All other places hold random words; a question ends with its last key.
Zoology asks at the key itself; here ``=`` follows it, after which a causal LM is to say the value.
"""

from __future__ import annotations

import random

from fairseq_posenc.tasks.answers import ASKS, ENDS
from fairseq_posenc.workbench.experiments.probe.haystack import KEYS, VALUES

_POWER = 0.01
_PLACE = 4  # words
SYMBOLS = [*KEYS, *VALUES, ENDS]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make pairs and places up to the last key, and its value."""
    pairs = min(max(1, length // 8), len(KEYS))
    keys, values = chance.sample(KEYS, pairs), chance.choices(VALUES, k=pairs)
    count = max(pairs, (length - 2 * pairs) // _PLACE)
    # The largest of u^(1/w) are a sample without replacement, of chances that go as the weights w.
    order = sorted(
        range(count), key=lambda place: -(chance.random() ** ((place + 1) ** (1 - _POWER)))
    )
    asked = dict(zip(order, zip(keys, values)))
    words = [word for pair in zip(keys, values) for word in pair]
    last = max(order[:pairs])
    for place in range(last):
        if place in asked:
            key, value = asked[place]
            words += [key, ASKS, value, ENDS]
        else:
            words += chance.choices(KEYS + VALUES, k=_PLACE)
    key, value = asked[last]
    return [*words, key], [value]
