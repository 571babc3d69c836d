"""The value modulo 5 of a sum of products without brackets (Deletang et al. 2023)."""

from __future__ import annotations

import random
from itertools import chain
from math import prod

_MODULUS = 5
DIGITS = [str(digit) for digit in range(_MODULUS)]
SYMBOLS = [*DIGITS, *"+-*"]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make digits with an operator between any two, and the value; products come first."""
    digits = chance.choices(DIGITS, k=max(1, (length + 1) // 2))
    operators = chance.choices("+-*", k=len(digits) - 1)
    products = [[int(digits[0])]]
    for operator, digit in zip(operators, map(int, digits[1:])):
        if operator == "*":
            products[-1].append(digit)
        else:
            products.append([1 if operator == "+" else -1, digit])
    value = sum(map(prod, products)) % _MODULUS
    return [*chain(*zip(digits, operators)), digits[-1]], [str(value)]
