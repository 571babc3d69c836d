"""The answer of the records: the best figure, what is not told apart from it, and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

from fairseq_posenc.workbench.results.evidence import measured, page
from fairseq_posenc.workbench.results.evidence.measured import Column

_FEW = 8  # candidates to train where a user names none


class Question(NamedTuple):
    """What a user asks.

    Attributes:
        family: of models.
        length: of what is read, in tokens.
        trained: the length of training.
    """

    family: str
    length: int
    trained: int


def deciding(question: Question) -> Optional[Column]:
    """Return the figures that an answer goes by, None if nothing was measured.

    Beyond the length of training they are those at the least multiple that is as far or further;
    else those with intervals before those of one seed.
    """
    if question.length > question.trained:
        multiples = measured.multiples(question.family)
        wanted = question.length / question.trained
        return next(
            (measured.at_length(question.family, n) for n in multiples if n >= wanted), None
        )
    return measured.compared(question.family) or measured.early(question.family)[0]


def answer(question: Question) -> str:
    """Return the answer in Markdown, with all that is known of the encodings it names."""
    head = f"{question.family}, trained at {question.trained:,} tokens, read at {question.length:,}"
    column = deciding(question)
    if column is None:
        return f"{head}: {measured.NOT_MEASURED}; train candidates on a text: --text, --budget."
    best, same, behind = column.best()
    unread = [name for name in column.of if math.isinf(column.of[name].mean)]
    unknown = [name for name in measured.names(question.family) if name not in column.of]
    better = "higher" if column.higher else "lower"
    lines = [
        f"{head}. By the {column.title} ({column.source}), where {better} is better:",
        "",
        f"- best: {_named([best])}, {column.show(best)}",
        *_line("not told apart from it", same),
        *_line("behind it", behind),
        *_line("cannot be read there", unread),
        *_line(measured.NOT_MEASURED, unknown),
    ]
    return "\n".join([*lines, "", page.table(question.family, [best, *same, *behind, *unread])])


def candidates(question: Question) -> list[str]:
    """Return whom to train where a user names none: those with the best figures.

    Those that decide come first, then those of one seed.
    """
    columns = (deciding(question), measured.early(question.family)[0])
    ranked = [name for column in columns if column for name in column.ranked()]
    known = measured.names(question.family)
    first = [name for name in dict.fromkeys(ranked) if name in known]
    return [*first, *(name for name in known if name not in first)][:_FEW]


def _line(what: str, names: list[str]) -> list[str]:
    return [f"- {what}: {_named(names)}"] if names else []


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
