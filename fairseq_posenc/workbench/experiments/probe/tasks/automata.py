"""Tasks that track a state: bits, a place on a circle, a value, a stack.

Deletang et al. (2023) is arXiv:2207.02098.
"""

from __future__ import annotations

import random
from math import prod

from fairseq_posenc.workbench.experiments.probe.tasks.base import Example, register

_DIGITS = "01234"  # places of the circle, and the numbers of arithmetic
_MODULUS = len(_DIGITS)
_STEPS = {"stay": 0, "right": 1, "left": -1}
_FLIP_FLOP_WEIGHTS = (1, 8, 1)  # of w, i and r: mostly i, so that the last write is far back
_PUSHES = {"push0": "0", "push1": "1"}
_ACTIONS = (*_PUSHES, "pop")
_END = "."


@register("01")
def parity(rng: random.Random, length: int) -> Example:
    """Say whether the number of ones is even (0) or odd (1)."""
    bits = rng.choices("01", k=length)
    return bits, [str(bits.count("1") % 2)]


@register("01")
def even_pairs(rng: random.Random, length: int) -> Example:
    """Say whether the number of unequal neighbours is even (1) or odd (0) (Deletang et al. 2023).

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


@register(["0", "1", *_ACTIONS, _END])
def stack_manipulation(rng: random.Random, length: int) -> Example:
    """Say what is on a stack after pushes and pops (Deletang et al. 2023).

    The question is a stack, from its bottom, followed by operations; ``pop`` does nothing to an
    empty stack. The answer is the stack from its top, padded with ``.`` to one word more than the
    question.
    """
    stack = rng.choices("01", k=rng.randint(0, length))
    actions = rng.choices(_ACTIONS, k=length - len(stack))
    question = [*stack, *actions]
    for action in actions:
        if action in _PUSHES:
            stack.append(_PUSHES[action])
        elif stack:
            stack.pop()
    return question, [*reversed(stack), *[_END] * (length + 1 - len(stack))]
