"""The tasks, a module each: the module's name is the task's.

A module has ``SYMBOLS``, all words that may occur, and ``example(chance, length)``, which returns
the words of a question about ``length`` long and those of its only right answer. How the length is
meant where it is not the number of words, the module's docstring says. A question may ask, with
:data:`~fairseq_posenc.tasks.answers.ASKS`, and answer on its way. An ``example`` that also takes a
``depth``, from 0 to 1, is read at several depths.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError

Example = tuple[list[str], list[str]]  # words of the question, of the answer


class Task(NamedTuple):
    """A task.

    Attributes:
        name: of its module.
        symbols: all words that may occur.
        example: makes a question and its answer from a random.Random, a length, and a depth
            if ``has_depth``.
        has_depth: whether a depth can be asked for.
    """

    name: str
    symbols: Sequence[str]
    example: Callable[..., Example]
    has_depth: bool


def names() -> list[str]:
    """List the names of all tasks."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> Task:
    """Look up a task.

    Raises:
        UserError: there is none of this name.
    """
    if name not in names():
        raise UserError(f"--tasks: {name!r} is none of {', '.join(names())}")
    module: Any = import_module(f"{__name__}.{name}")
    has_depth = "depth" in inspect.signature(module.example).parameters
    return Task(name, tuple(module.SYMBOLS), module.example, has_depth)
