"""Tasks that find values by their keys: in pairs, and hidden in noise as RULER does.

RULER is Hsieh et al. (2024), arXiv:2404.06654. A needle has three words, as in ``k7 is v2``. Tasks
with several needles have four, or as many as fit into the length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from string import ascii_lowercase as LETTERS
from typing import Optional

from fairseq_posenc.tasks.answers import ASKS, ENDS
from fairseq_posenc.workbench.experiments.probe.tasks.base import Example, register

_KEYS = [f"k{number}" for number in range(64)]
_VALUES = [f"v{number}" for number in range(64)]
_NOISE = [f"n{number}" for number in range(32)]
_VARIABLES = [f"x{number}" for number in range(64)]
_IS, _ASSIGN, _ASK = "is", ":=", "?"
_HAYSTACK = [*_KEYS, *_VALUES, *_NOISE, _IS, _ASK]
_NEEDLE = 3  # words of a needle
_HOPS = 4  # assignments in a chain of variables
_MANY_KEYS = [f"k{number}" for number in range(256)]
_QUERIES = 4
_POWER = 0.01  # mqar's exponent of the power law
_PLACE = 4  # words of a place in mqar


@register([*_MANY_KEYS, *LETTERS, _ASK])
def recall(rng: random.Random, length: int) -> Example:
    """Say the values of up to four keys, after pairs of keys and values.

    The length is that of all pairs.
    """
    keys = rng.sample(_MANY_KEYS, min(max(1, length // 2), len(_MANY_KEYS)))
    values = dict(zip(keys, rng.choices(LETTERS, k=len(keys))))
    queried = rng.sample(keys, min(_QUERIES, len(keys)))
    pairs = [word for pair in values.items() for word in pair]
    return [*pairs, _ASK, *queried], [values[key] for key in queried]


@register([*_KEYS, *_VALUES, ENDS])
def mqar(rng: random.Random, length: int) -> Example:
    """Say the value of each key where it comes again: multi-query associative recall of zoology.

    A question begins with pairs of a key and its value, one for every eight words. Then come places
    of four words. Each key comes again at a place of its own, drawn by a power law that prefers the
    first places, with ``=``, its value and ``;``. All other places hold random words. The question
    ends with the last key. In zoology the model says the value at the key itself, here after ``=``.
    Source: Arora et al. (2023), arXiv:2312.04927.
    """
    pairs = min(max(1, length // 8), len(_KEYS))
    keys = rng.sample(_KEYS, pairs)
    values = rng.choices(_VALUES, k=pairs)
    count = max(pairs, (length - 2 * pairs) // _PLACE)
    # Sorted by u^(1/w), u uniform, items are a sample without replacement of weights w.
    order = sorted(range(count), key=lambda place: -(rng.random() ** ((place + 1) ** (1 - _POWER))))
    queried = dict(zip(order, zip(keys, values)))
    words = [word for pair in zip(keys, values) for word in pair]
    last = max(order[:pairs])
    for place in range(last):
        if place in queried:
            key, value = queried[place]
            words += [key, ASKS, value, ENDS]
        else:
            words += rng.choices(_KEYS + _VALUES, k=_PLACE)
    key, value = queried[last]
    return [*words, key], [value]


@register(_HAYSTACK)
def needle(rng: random.Random, length: int, depth: Optional[float] = None) -> Example:
    """Say the value of the only key in the noise (RULER's single needle)."""
    key, value = rng.choice(_KEYS), rng.choice(_VALUES)
    return [*_hide_needles(rng, [(key, _IS, value)], length, depth), _ASK, key], [value]


@register(_HAYSTACK)
def needle_multi_key(rng: random.Random, length: int) -> Example:
    """Say the value of one of several keys in the noise (RULER's multi-key)."""
    values, needles = _draw_needles(rng, length)
    queried = rng.choice(list(values))
    return [*_hide_needles(rng, needles, length), _ASK, queried], [values[queried]]


@register(_HAYSTACK)
def needle_multi_value(rng: random.Random, length: int) -> Example:
    """Say all values of a key in the noise, in their order (RULER's multi-value)."""
    count = _count_needles(length)
    key = rng.choice(_KEYS)
    values = rng.sample(_VALUES, count)
    needles = [(key, _IS, value) for value in values]
    return [*_hide_needles(rng, needles, length), _ASK, key], values


@register([*_HAYSTACK, ENDS])
def needle_multi_query(rng: random.Random, length: int) -> Example:
    """Say the values of all keys in the noise, one after the other (RULER's multi-query).

    Keys are asked in random order. The length is that of the noise with its needles.
    """
    values, needles = _draw_needles(rng, length)
    queried = rng.sample(list(values), len(values))
    known = [word for key in queried[:-1] for word in (key, ASKS, values[key], ENDS)]
    hidden = _hide_needles(rng, needles, length)
    return [*hidden, _ASK, *known, queried[-1]], [values[queried[-1]]]


@register([*_VARIABLES, *_VALUES, *_NOISE, _ASSIGN, _ASK])
def variable_tracking(rng: random.Random, length: int) -> Example:
    """Say which variables have a value, which is assigned to one and passed on to others (RULER).

    The assignments stand in noise: the value to a variable, then each variable to the next, in a
    chain of up to four hops. The answer names the variables in the order of assignments.
    """
    names = rng.sample(_VARIABLES, _count_needles(length, _HOPS + 1))
    value = rng.choice(_VALUES)
    chain = [(name, _ASSIGN, source) for name, source in zip(names, [value, *names])]
    return [*_hide_needles(rng, chain, length), _ASK, value], names


def _count_needles(length: int, most: int = 4) -> int:
    return min(most, max(1, length // _NEEDLE))


def _draw_needles(rng: random.Random, length: int) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """Draw values by key, and their needles."""
    count = _count_needles(length)
    values = dict(zip(rng.sample(_KEYS, count), rng.choices(_VALUES, k=count)))
    return values, [(key, _IS, value) for key, value in values.items()]


def _hide_needles(
    rng: random.Random,
    needles: Sequence[Sequence[str]],
    length: int,
    depth: Optional[float] = None,
) -> list[str]:
    """Put needles, in their order, between words of noise.

    Args:
        rng: random generator.
        needles: the words of each needle.
        length: number of words, with the needles.
        depth: place of all needles, from 0 at the beginning to 1 at the end; None for random ones.
    """
    noise = rng.choices(_NOISE, k=max(0, length - sum(map(len, needles))))
    places = sorted(rng.randint(0, len(noise)) for _ in needles)
    if depth is not None:
        places = [round(depth * len(noise))] * len(needles)
    words, start = [], 0
    for place, needle in zip(places, needles):
        words += [*noise[start:place], *needle]
        start = place
    return words + noise[start:]
