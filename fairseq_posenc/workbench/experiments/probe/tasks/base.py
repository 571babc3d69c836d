"""The registration of tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

Example = tuple[list[str], list[str]]  # words of the question, of its answer
Make = Callable[..., Example]


class Task(NamedTuple):
    """A task: questions with one right answer each."""

    name: str
    symbols: Sequence[str]  # all words that may occur
    # makes a question of about a length, in words, and its answer from a `random.Random` and the
    # length; and from a depth from 0 to 1 if `has_depth`
    example: Make
    has_depth: bool  # whether questions can be made for a depth, at which the needle is hidden


TASKS: dict[str, Task] = {}


def register(symbols: Sequence[str]) -> Callable[[Make], Make]:
    """Make a function a task of its name; ``symbols`` are all words that may occur.

    The function's docstring says how the length is meant where it is not that of the question. A
    question may ask, with :data:`~fairseq_posenc.tasks.answers.ASKS`, and answer on its way.
    """

    def add(example: Make) -> Make:
        name, has_depth = example.__name__, "depth" in inspect.signature(example).parameters
        TASKS[name] = Task(name, tuple(symbols), example, has_depth)
        return example

    return add
