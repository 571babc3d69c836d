"""Tasks that copy, reorder, index or add.

Deletang et al. (2023) is arXiv:2207.02098, Ruoss et al. (2023) arXiv:2305.16843.
"""

from __future__ import annotations

import random
from string import ascii_lowercase as LETTERS
from string import digits as DIGITS

from fairseq_posenc.workbench.experiments.probe.tasks.base import Example, register

_ASK, _MISSING = "?", "_"
_WORDS = [f"w{number}" for number in range(512)]
_FARTHEST = 9  # most places between a word and the one asked for
_SHIFTS = [f"{shift:+}" for shift in range(-_FARTHEST, _FARTHEST + 1) if shift]


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
