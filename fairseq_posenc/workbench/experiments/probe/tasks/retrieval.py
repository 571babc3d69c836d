"""Tasks that find values by their keys: in pairs, or hidden in noise as in RULER.

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
_NEEDLE_SYMBOLS = [*_KEYS, *_VALUES, *_NOISE, _IS, _ASK]
_WORDS_PER_NEEDLE = 3
_NEEDLES = 4  # most needles of a question, except for chains of assignments
_HOPS = 4  # most assignments of a variable to the next
_RECALL_KEYS = [f"k{number}" for number in range(256)]
_RECALL_QUERIES = 4  # most keys of a question
_MQAR_EXPONENT = -0.99  # of the power law; `power_a - 1` in the source
_WORDS_PER_SLOT = 4  # the key, `ASKS`, its value, `ENDS`


@register([*_RECALL_KEYS, *LETTERS, _ASK])
def recall(rng: random.Random, length: int) -> Example:
    """Say the values of up to four keys, after pairs of keys and values.

    The length is that of all pairs.
    """
    keys = rng.sample(_RECALL_KEYS, min(max(1, length // 2), len(_RECALL_KEYS)))
    values = dict(zip(keys, rng.choices(LETTERS, k=len(keys))))
    queried = rng.sample(keys, min(_RECALL_QUERIES, len(keys)))
    pairs = [word for pair in values.items() for word in pair]
    return [*pairs, _ASK, *queried], [values[key] for key in queried]


@register([*_KEYS, *_VALUES, ENDS])
def mqar(rng: random.Random, length: int) -> Example:
    """Say the value of each key where it comes again (multi-query associative recall).

    A question begins with pairs of a key and its value, one for every eight words. Slots of four
    words follow. Each key comes again in a slot of its own, drawn by a power law that prefers the
    first slots, as ``key = value ;``. All other slots hold random words. The question ends with the
    last key, so all answers but the last stand in the question. In the source, the model says the
    value at the key itself, here after ``=``.
    Source: Arora et al. (2023), "Zoology", arXiv:2312.04927.
    """
    count = min(max(1, length // 8), len(_KEYS))
    keys = rng.sample(_KEYS, count)
    pairs = list(zip(keys, rng.choices(_VALUES, k=count)))
    slots = max(count, (length - 2 * count) // _WORDS_PER_SLOT)
    # The slots with the largest u^(1 / weight), u uniform, are a sample without replacement
    # (Efraimidis and Spirakis 2006).
    weights = [(slot + 1) ** _MQAR_EXPONENT for slot in range(slots)]
    order = sorted(range(slots), key=lambda slot: rng.random() ** (1 / weights[slot]), reverse=True)
    pair_of_slot = dict(zip(order, pairs))
    words = [word for pair in pairs for word in pair]
    last = max(pair_of_slot)
    for slot in range(last):
        if slot in pair_of_slot:
            key, value = pair_of_slot[slot]
            words += [key, ASKS, value, ENDS]
        else:
            words += rng.choices(_KEYS + _VALUES, k=_WORDS_PER_SLOT)
    key, value = pair_of_slot[last]
    return [*words, key], [value]


@register(_NEEDLE_SYMBOLS)
def needle(rng: random.Random, length: int, depth: Optional[float] = None) -> Example:
    """Say the value of the only key in the noise (RULER's single needle); tests vary its depth."""
    key = rng.choice(_KEYS)
    value = rng.choice(_VALUES)
    return [*_hide_needles(rng, [(key, _IS, value)], length, depth), _ASK, key], [value]


@register(_NEEDLE_SYMBOLS)
def needle_multi_key(rng: random.Random, length: int) -> Example:
    """Say the value of one of several keys in the noise (RULER's multi-key)."""
    values, needles = _draw_needles(rng, length)
    queried = rng.choice(list(values))
    return [*_hide_needles(rng, needles, length), _ASK, queried], [values[queried]]


@register(_NEEDLE_SYMBOLS)
def needle_multi_value(rng: random.Random, length: int) -> Example:
    """Say all values of a key in the noise, in their order (RULER's multi-value)."""
    count = _count_needles(length)
    key = rng.choice(_KEYS)
    values = rng.sample(_VALUES, count)
    needles = [(key, _IS, value) for value in values]
    return [*_hide_needles(rng, needles, length), _ASK, key], values


@register([*_NEEDLE_SYMBOLS, ENDS])
def needle_multi_query(rng: random.Random, length: int) -> Example:
    """Say the values of all keys in the noise, one after the other (RULER's multi-query).

    Keys are asked in random order; all answers but the last stand in the question. The length is
    that of the noise with its needles.
    """
    values, needles = _draw_needles(rng, length)
    *earlier, last = rng.sample(list(values), len(values))
    answered = [word for key in earlier for word in (key, ASKS, values[key], ENDS)]
    hidden = _hide_needles(rng, needles, length)
    return [*hidden, _ASK, *answered, last], [values[last]]


@register([*_VARIABLES, *_VALUES, *_NOISE, _ASSIGN, _ASK])
def variable_tracking(rng: random.Random, length: int) -> Example:
    """Say which variables have a given value, in the order of assignments (RULER).

    The question names the value. The assignments stand in noise: ``x5 := v2``, then a chain of up
    to four hops, ``x9 := x5``, ``x1 := x9`` and so on.
    """
    names = rng.sample(_VARIABLES, _count_needles(length, _HOPS + 1))
    value = rng.choice(_VALUES)
    chain = [(name, _ASSIGN, source) for name, source in zip(names, [value, *names])]
    return [*_hide_needles(rng, chain, length), _ASK, value], names


def _count_needles(length: int, most: int = _NEEDLES) -> int:
    return min(most, max(1, length // _WORDS_PER_NEEDLE))


def _draw_needles(rng: random.Random, length: int) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """Draw needles; return the values by key, and the words of each needle."""
    count = _count_needles(length)
    values = dict(zip(rng.sample(_KEYS, count), rng.choices(_VALUES, k=count)))
    return values, [(key, _IS, value) for key, value in values.items()]


def _hide_needles(
    rng: random.Random,
    needles: Sequence[Sequence[str]],
    length: int,
    depth: Optional[float] = None,
) -> list[str]:
    """Put needles, in their order, between words of noise; the length counts both.

    With a ``depth``, from 0 for the beginning to 1 for the end, all needles stand together at this
    place; without one, their places are random.
    """
    noise = rng.choices(_NOISE, k=max(0, length - sum(map(len, needles))))
    # Places are drawn even with a depth: other draws would change all later examples of the seed.
    places = sorted(rng.randint(0, len(noise)) for _ in needles)
    if depth is not None:
        places = [round(depth * len(noise))] * len(needles)
    words = []
    end = 0
    for place, needle in zip(places, needles):
        words += [*noise[end:place], *needle]
        end = place
    return words + noise[end:]
