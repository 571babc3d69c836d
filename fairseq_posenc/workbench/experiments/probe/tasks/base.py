"""The type of a task of ``probe``, and the registry, which the modules of this package fill.

A task is a function that draws a question and its answer as lists of words: ``copy(rng, 3)`` may
return ``(["q", "a", "q"], ["q", "a", "q"])``. A question may contain earlier questions, each with
its answer between :data:`~fairseq_posenc.tasks.answers.ASKS` and ``ENDS``. Earlier answers are
scored as well, except with encoder-decoders, which read them in the source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

Example = tuple[list[str], list[str]]  # words of the question, and of its answer
# Its arguments are a `random.Random`, the rough length in words of the question (or of the part
# that its docstring names) and, for some tasks, the depth of the needle: 0 at the start, 1 at the
# end.
ExampleMaker = Callable[..., Example]


class Task(NamedTuple):
    """A registered task."""

    name: str
    words: Sequence[str]  # all words that may occur in questions and answers, except `ASKS`
    make_example: ExampleMaker
    has_depth: bool  # whether the answer is a needle that can be put at a depth


TASKS: dict[str, Task] = {}


def register(words: Sequence[str]) -> Callable[[ExampleMaker], ExampleMaker]:
    """Register a function as the task of its name; ``words`` are those of :class:`Task`."""

    def add(make: ExampleMaker) -> ExampleMaker:
        name = make.__name__
        has_depth = "depth" in inspect.signature(make).parameters
        TASKS[name] = Task(name, tuple(words), make, has_depth)
        return make

    return add
