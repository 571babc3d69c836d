"""Tasks with known answers: functions that draw a question and its answer as lists of words.

``copy(rng, 3)`` may return ``(["q", "a", "q"], ["q", "a", "q"])``. A question may contain earlier
questions, each with its answer between ``ASKS`` and ``ENDS``. Earlier answers are scored as well,
except with encoder-decoders, which read them in the source.

Deletang et al. (2023) is arXiv:2207.02098, Ruoss et al. (2023) arXiv:2305.16843. RULER is Hsieh et
al. (2024), arXiv:2404.06654; its needles have three words, as in ``k7 is v2``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from string import ascii_lowercase as LETTERS
from string import digits as DIGITS
from typing import NamedTuple

from fairseq_posenc.tasks.answers import ASKS, ENDS

Example = tuple[list[str], list[str]]  # words of the question, and of its answer
# Its second argument is the rough length of the question in words, or of the part that the
# docstring names.
ExampleMaker = Callable[[random.Random, int], Example]


class Task(NamedTuple):
    """A registered task."""

    name: str
    words: Sequence[str]  # all words that may occur in questions and answers, except `ASKS`
    make_example: ExampleMaker


TASKS: dict[str, Task] = {}
_ASK, _MISSING = "?", "_"
_WORDS = [f"w{number}" for number in range(512)]
_FARTHEST = 9  # most places between a word and the one in question
_SHIFTS = [f"{shift:+}" for shift in range(-_FARTHEST, _FARTHEST + 1) if shift]
_DIGITS = "01234"  # places of the circle, and the numbers of arithmetic
_MODULUS = len(_DIGITS)
_STEPS = {"stay": 0, "right": 1, "left": -1}
_FLIP_FLOP_WEIGHTS = (1, 8, 1)  # of w, i and r: mostly i, so that the last write is far back
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


def register(words: Sequence[str]) -> Callable[[ExampleMaker], ExampleMaker]:
    """Register a function as the task of its name; ``words`` are those of :class:`Task`."""

    def add(make: ExampleMaker) -> ExampleMaker:
        TASKS[make.__name__] = Task(make.__name__, tuple(words), make)
        return make

    return add


@register(LETTERS)
def copy(rng: random.Random, length: int) -> Example:
    """Say the letters again."""
    letters = rng.choices(LETTERS, k=length)
    return letters, letters


@register(LETTERS)
def reverse(rng: random.Random, length: int) -> Example:
    """Say the letters from the last to the first."""
    letters = rng.choices(LETTERS, k=length)
    return letters, letters[::-1]


@register(LETTERS)
def sort(rng: random.Random, length: int) -> Example:
    """Say the letters in the order of the alphabet."""
    letters = rng.choices(LETTERS, k=length)
    return letters, sorted(letters)


@register("01234")
def bucket_sort(rng: random.Random, length: int) -> Example:
    """Say digits below 5 in ascending order; counting them is enough (Deletang et al. 2023)."""
    digits = rng.choices("01234", k=length)
    return digits, sorted(digits)


@register("01")
def odds_first(rng: random.Random, length: int) -> Example:
    """Say the bits at odd places, counted from 1, then the others (Deletang et al. 2023)."""
    bits = rng.choices("01", k=length)
    return bits, bits[::2] + bits[1::2]


@register(DIGITS + "+")
def addition(rng: random.Random, length: int) -> Example:
    """Add two numbers of half as many digits as the length; the sum has a digit more."""
    digits = max(1, length // 2)
    first, other = (rng.randrange(10**digits) for _ in range(2))
    question = f"{first:0{digits}}+{other:0{digits}}"
    return list(question), list(f"{first + other:0{digits + 1}}")


@register(LETTERS + _MISSING)
def missing_duplicate(rng: random.Random, length: int) -> Example:
    """Say the letter that is missing in the second copy of a word (Ruoss et al. 2023).

    The length is that of both words together.
    """
    word = rng.choices(LETTERS, k=max(1, length // 2))
    gap = rng.randrange(len(word))
    return [*word, *word[:gap], _MISSING, *word[gap + 1 :]], [word[gap]]


@register(LETTERS + DIGITS + _ASK)
def look_up(rng: random.Random, length: int) -> Example:
    """Say the letter at a place below 1,000, given by three digits and counted from 0."""
    letters = rng.choices(LETTERS, k=length)
    place = rng.randrange(length)
    return [*letters, _ASK, *f"{place:03}"], [letters[place]]


@register([*_WORDS, *_SHIFTS, _ASK])
def indirect_indexing(rng: random.Random, length: int) -> Example:
    """Say the word some places after or before another one (PoPE, arXiv:2509.10534).

    The question ends with the other word and the number of places, as in ``w7 -2``. All words
    differ, so it has at most 512.
    """
    words = rng.sample(_WORDS, max(2, length))
    place = rng.randrange(len(words))
    near = range(max(0, place - _FARTHEST), min(len(words), place + _FARTHEST + 1))
    queried = rng.choice([other for other in near if other != place])
    return [*words, _ASK, words[place], f"{queried - place:+}"], [words[queried]]


@register("01")
def parity(rng: random.Random, length: int) -> Example:
    """Say whether the number of ones is even (0) or odd (1)."""
    bits = rng.choices("01", k=length)
    return bits, [str(bits.count("1") % 2)]


@register("01")
def even_pairs(rng: random.Random, length: int) -> Example:
    """Say whether the number of unequal neighbors is even (1) or odd (0) (Deletang et al. 2023).

    It is even if the first and the last bit are equal.
    """
    bits = rng.choices("01", k=length)
    return bits, [str(int(bits[0] == bits[-1]))]


@register([*_STEPS, *_DIGITS])
def cycle_navigation(rng: random.Random, length: int) -> Example:
    """Say at which of five places on a circle the steps from place 0 end (Deletang et al. 2023)."""
    steps = rng.choices(list(_STEPS), k=length)
    return steps, [str(sum(_STEPS[step] for step in steps) % _MODULUS)]


@register("wir01")
def flip_flop(rng: random.Random, length: int) -> Example:
    """Say the bit that was written last (Liu et al. 2023, arXiv:2306.00946).

    Each instruction comes with a bit: ``w`` writes it, ``i`` is to be ignored, and ``r`` reads the
    last written one. The first instruction writes; the last one reads, and its bit is the answer.
    """
    # The first instruction with its bit and the last one without make three words.
    between = rng.choices("wir", _FLIP_FLOP_WEIGHTS, k=max(0, (length - 3) // 2))
    words = []
    written = ""
    for instruction in ["w", *between]:
        bit = written if instruction == "r" else rng.choice("01")
        if instruction == "w":
            written = bit
        words += [instruction, bit]
    return [*words, "r"], [written]


@register([*_DIGITS, *"+-*"])
def modular_arithmetic(rng: random.Random, length: int) -> Example:
    """Compute a sum of products, without brackets, modulo 5 (Deletang et al. 2023)."""
    digits = rng.choices(_DIGITS, k=max(1, (length + 1) // 2))
    operators = rng.choices("+-*", k=len(digits) - 1)
    question = digits[:1]
    products = [[int(digits[0])]]  # factors of each product
    for operator, digit in zip(operators, digits[1:]):
        question += [operator, digit]
        if operator == "*":
            products[-1].append(int(digit))
        else:
            products.append([1 if operator == "+" else -1, int(digit)])
    value = sum(map(prod, products)) % _MODULUS
    return question, [str(value)]


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
    last key, so all answers but the last are in the question. In the source, the model says the
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
def needle(rng: random.Random, length: int) -> Example:
    """Say the value of the only key in the noise (RULER's single needle)."""
    key = rng.choice(_KEYS)
    value = rng.choice(_VALUES)
    return [*_hide_needles(rng, [(key, _IS, value)], length), _ASK, key], [value]


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

    Keys are asked in random order; all answers but the last are in the question. The length is
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

    The question names the value. The assignments are among noise: ``x5 := v2``, then a chain of up
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


def _hide_needles(rng: random.Random, needles: Sequence[Sequence[str]], length: int) -> list[str]:
    """Put needles, in their order, at random places in noise; the length counts both."""
    noise = rng.choices(_NOISE, k=max(0, length - sum(map(len, needles))))
    places = sorted(rng.randint(0, len(noise)) for _ in needles)
    words = []
    end = 0
    for place, needle in zip(places, needles):
        words += [*noise[end:place], *needle]
        end = place
    return words + noise[end:]
