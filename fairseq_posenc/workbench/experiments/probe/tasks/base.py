"""The type of a task of ``probe``, and the registry of all tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

Example = tuple[list[str], list[str]]  # words of the question, of its answer
ExampleMaker = Callable[..., Example]


class Task(NamedTuple):
    """A task: questions with one right answer each."""

    name: str
    symbols: Sequence[str]  # all words that may occur
    # Makes a question and its answer from a `random.Random`, the question's rough length in words
    # and, if `has_depth`, the depth of the needle: 0 puts it at the start, 1 at the end.
    make_example: ExampleMaker
    has_depth: bool  # whether the answer is a needle that can be put at a depth


TASKS: dict[str, Task] = {}


def register(symbols: Sequence[str]) -> Callable[[ExampleMaker], ExampleMaker]:
    """Register a function as the task of the function's name.

    If the length does not count the words of the question, the function's docstring says what it
    counts. A question may contain earlier questions with their answers; an answer stands between
    :data:`~fairseq_posenc.tasks.answers.ASKS` and ``ENDS``. These answers are scored as well,
    unless an encoder-decoder reads them in its source.

    Args:
        symbols: all words that may occur.
    """

    def add(make: ExampleMaker) -> ExampleMaker:
        name = make.__name__
        has_depth = "depth" in inspect.signature(make).parameters
        TASKS[name] = Task(name, tuple(symbols), make, has_depth)
        return make

    return add
