"""The tasks of ``probe``: questions with a single right answer, in which a token is a word."""

from __future__ import annotations

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.probe.tasks import (  # noqa: F401  (they register tasks)
    automata,
    retrieval,
    sequences,
)
from fairseq_posenc.workbench.experiments.probe.tasks.base import TASKS, Task


def get(name: str) -> Task:
    """Look up a task.

    Raises:
        UserError: no task has this name.
    """
    if name not in TASKS:
        raise UserError(f"--tasks: unknown task {name!r}: choose from {', '.join(sorted(TASKS))}")
    return TASKS[name]
