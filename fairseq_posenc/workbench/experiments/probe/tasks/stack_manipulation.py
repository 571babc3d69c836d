"""What is on a stack after pushes and pops? (Deletang et al. 2023).

The question is a stack, from its bottom, and then what is done: ``push0``, ``push1`` or ``pop``,
which does nothing to an empty stack. The answer is the stack from its top, filled with ``.`` to a
word more than the question has.
"""

from __future__ import annotations

import random

END = "."
ACTIONS = ("push0", "push1", "pop")
SYMBOLS = ["0", "1", *ACTIONS, END]


def example(chance: random.Random, length: int) -> tuple[list[str], list[str]]:
    """Make a stack and actions, and the stack after them."""
    stack = chance.choices("01", k=chance.randint(0, length))
    actions = chance.choices(ACTIONS, k=length - len(stack))
    question = [*stack, *actions]
    for action in actions:
        if action != "pop":
            stack.append(action[-1])
        elif stack:
            stack.pop()
    return question, [*reversed(stack), *[END] * (length + 1 - len(stack))]
