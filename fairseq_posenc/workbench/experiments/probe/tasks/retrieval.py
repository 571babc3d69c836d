"""Tasks that find values by their keys: in pairs, and hidden in noise as RULER does.

RULER is Hsieh et al. (2024), arXiv:2404.06654. A needle is three words, as in ``k7 is v2``; a
question has four where its length has room for them.
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
_POWER, _PLACE = 0.01, 4  # mqar's exponent of the power law, and words a place


@register([*_MANY_KEYS, *LETTERS, _ASK])
def recall(chance: random.Random, length: int) -> Example:
    """Say the values of up to four keys, after pairs of keys and values.

    The length is that of all pairs.
    """
    keys = chance.sample(_MANY_KEYS, min(max(1, length // 2), len(_MANY_KEYS)))
    values = dict(zip(keys, chance.choices(LETTERS, k=len(keys))))
    asked = chance.sample(keys, min(_QUERIES, len(keys)))
    pairs = [word for pair in values.items() for word in pair]
    return [*pairs, _ASK, *asked], [values[key] for key in asked]


@register([*_KEYS, *_VALUES, ENDS])
def mqar(chance: random.Random, length: int) -> Example:
    """Say the value of each key as it comes: multi-query associative recall, as zoology makes it.

    A question begins with pairs of a key and its value, one for each eight words. Then come places
    of four words: of each key stands its own, drawn by a power law that prefers the first ones,
    with ``=``, the value and ``;``. All other places hold random words; a question ends with its
    last key. Zoology asks at the key itself; here ``=`` follows it, after which a causal LM is to
    say the value. Source: Arora et al. (2023), arXiv:2312.04927.
    """
    pairs = min(max(1, length // 8), len(_KEYS))
    keys, values = chance.sample(_KEYS, pairs), chance.choices(_VALUES, k=pairs)
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
            words += chance.choices(_KEYS + _VALUES, k=_PLACE)
    key, value = asked[last]
    return [*words, key], [value]


@register(_HAYSTACK)
def needle(chance: random.Random, length: int, depth: Optional[float] = None) -> Example:
    """Say the value of the only key in the noise (RULER's single needle)."""
    key, value = chance.choice(_KEYS), chance.choice(_VALUES)
    return [*_hide_needles(chance, [(key, _IS, value)], length, depth), _ASK, key], [value]


@register(_HAYSTACK)
def needle_multi_key(chance: random.Random, length: int) -> Example:
    """Say the value of one of several keys in the noise (RULER's multi-key)."""
    values, needles = _draw_needles(chance, length)
    asked = chance.choice(list(values))
    return [*_hide_needles(chance, needles, length), _ASK, asked], [values[asked]]


@register(_HAYSTACK)
def needle_multi_value(chance: random.Random, length: int) -> Example:
    """Say all values of a key in the noise, in their order (RULER's multi-value)."""
    count = _count_needles(length)
    key, values = chance.choice(_KEYS), chance.sample(_VALUES, count)
    needles = [(key, _IS, value) for value in values]
    return [*_hide_needles(chance, needles, length), _ASK, key], values


@register([*_HAYSTACK, ENDS])
def needle_multi_query(chance: random.Random, length: int) -> Example:
    """Say the values of all keys in the noise, one after the other (RULER's multi-query).

    Keys are asked in an order of their own. The length is that of the noise with its needles.
    """
    values, needles = _draw_needles(chance, length)
    asked = chance.sample(list(values), len(values))
    known = [word for key in asked[:-1] for word in (key, ASKS, values[key], ENDS)]
    hidden = _hide_needles(chance, needles, length)
    return [*hidden, _ASK, *known, asked[-1]], [values[asked[-1]]]


@register([*_VARIABLES, *_VALUES, *_NOISE, _ASSIGN, _ASK])
def variable_tracking(chance: random.Random, length: int) -> Example:
    """Say which variables have a value, given to one and passed on to others (RULER).

    Assignments, each of a value or another variable to a variable, stand in noise; a chain has
    four hops where there is room. The answer names the variables in the order of assignments.
    """
    names = chance.sample(_VARIABLES, _count_needles(length, _HOPS + 1))
    value = chance.choice(_VALUES)
    chain = [(name, _ASSIGN, source) for name, source in zip(names, [value, *names])]
    return [*_hide_needles(chance, chain, length), _ASK, value], names


def _count_needles(length: int, most: int = 4) -> int:
    return min(most, max(1, length // _NEEDLE))


def _draw_needles(
    chance: random.Random, length: int
) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """Draw values by key, and their needles."""
    count = _count_needles(length)
    values = dict(zip(chance.sample(_KEYS, count), chance.choices(_VALUES, k=count)))
    return values, [(key, _IS, value) for key, value in values.items()]


def _hide_needles(
    chance: random.Random,
    needles: Sequence[Sequence[str]],
    length: int,
    depth: Optional[float] = None,
) -> list[str]:
    """Put needles, in their order, between words of noise.

    Args:
        chance: source of randomness.
        needles: the words of each.
        length: of the whole, in words.
        depth: where all of them stand, from 0, the beginning, to 1; by default anywhere.
    """
    noise = chance.choices(_NOISE, k=max(0, length - sum(map(len, needles))))
    places = sorted(chance.randint(0, len(noise)) for _ in needles)
    if depth is not None:
        places = [round(depth * len(noise))] * len(needles)
    words, start = [], 0
    for place, needle in zip(places, needles):
        words += [*noise[start:place], *needle]
        start = place
    return words + noise[start:]
