"""Tasks that copy, reorder, index or add."""

from __future__ import annotations

import random
from string import ascii_lowercase as LETTERS
from string import digits as DIGITS

from fairseq_posenc.workbench.experiments.probe.tasks.base import Example, register

ASK, MISSING = "?", "_"
_WORDS = [f"w{number}" for number in range(512)]
_FARTHEST = 9
_SHIFTS = [f"{shift:+}" for shift in range(-_FARTHEST, _FARTHEST + 1) if shift]


@register(LETTERS)
def copy(chance: random.Random, length: int) -> Example:
    """Say the letters again."""
    letters = chance.choices(LETTERS, k=length)
    return letters, letters


@register(LETTERS)
def reverse(chance: random.Random, length: int) -> Example:
    """Say the letters from the last to the first."""
    letters = chance.choices(LETTERS, k=length)
    return letters, letters[::-1]


@register(LETTERS)
def sort(chance: random.Random, length: int) -> Example:
    """Say the letters in the order of the alphabet."""
    letters = chance.choices(LETTERS, k=length)
    return letters, sorted(letters)


@register("01234")
def bucket_sort(chance: random.Random, length: int) -> Example:
    """Say digits below 5 in their order: it is enough to count them (Deletang et al. 2023)."""
    digits = chance.choices("01234", k=length)
    return digits, sorted(digits)


@register("01")
def odds_first(chance: random.Random, length: int) -> Example:
    """Say the bits at odd places, counted from 1, then the others (Deletang et al. 2023)."""
    bits = chance.choices("01", k=length)
    return bits, bits[::2] + bits[1::2]


@register(DIGITS + "+")
def addition(chance: random.Random, length: int) -> Example:
    """Add two numbers of half as many digits as the length; the sum has a digit more."""
    digits = max(1, length // 2)
    first, other = (chance.randrange(10**digits) for _ in range(2))
    question = f"{first:0{digits}}+{other:0{digits}}"
    return list(question), list(f"{first + other:0{digits + 1}}")


@register(LETTERS + MISSING)
def missing_duplicate(chance: random.Random, length: int) -> Example:
    """Say the letter that is missing where a word stands again (Ruoss et al. 2023).

    The length is that of both words together.
    """
    word = chance.choices(LETTERS, k=max(1, length // 2))
    gap = chance.randrange(len(word))
    return [*word, *word[:gap], MISSING, *word[gap + 1 :]], [word[gap]]


@register(LETTERS + DIGITS + ASK)
def look_up(chance: random.Random, length: int) -> Example:
    """Say the letter at a place, which is given by three digits and counted from 0."""
    letters = chance.choices(LETTERS, k=length)
    place = chance.randrange(length)
    return [*letters, ASK, *f"{place:03}"], [letters[place]]


@register([*_WORDS, *_SHIFTS, ASK])
def indirect_indexing(chance: random.Random, length: int) -> Example:
    """Say the word so many places after, or before, a given one (PoPE, arXiv:2509.10534).

    All words differ; the question ends with the given one and the number of places.
    """
    words = chance.sample(_WORDS, max(2, length))
    place = chance.randrange(len(words))
    near = range(max(0, place - _FARTHEST), min(len(words), place + _FARTHEST + 1))
    asked = chance.choice([other for other in near if other != place])
    return [*words, ASK, words[place], f"{asked - place:+}"], [words[asked]]
