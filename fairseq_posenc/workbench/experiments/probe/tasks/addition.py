"""Add two numbers, the digits in the usual order; each has half as many digits as the length."""

from __future__ import annotations

import random

SYMBOLS = "0123456789+"


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make two numbers of the same number of digits, and their sum with a digit more."""
    digits = max(1, length // 2)
    one, other = (chance.randrange(10**digits) for _ in range(2))
    question = f"{one:0{digits}}+{other:0{digits}}"
    return list(question), list(f"{one + other:0{digits + 1}}")
