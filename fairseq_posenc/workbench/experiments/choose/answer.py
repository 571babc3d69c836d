"""The answer of the records: what was measured, on what, and the best figure within that."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

from fairseq_posenc.workbench.experiments.evidence import measured, tables
from fairseq_posenc.workbench.experiments.evidence.measured import Column

_FEW = 8  # candidates to train where a user names none


class ChooseQuestion(NamedTuple):
    """What a user asks."""

    family: str  # masked-lm, causal-lm or encoder-decoder
    length: int  # tokens in an input
    trained: int  # the length of training


def choose_column(question: ChooseQuestion) -> Optional[Column]:
    """Choose the figures that decide an answer; None if nothing was measured.

    Beyond the length of training they are those at the least multiple that is as far or further;
    else those with intervals before those of one seed.
    """
    if question.length > question.trained:
        multiples = measured.multiples(question.family)
        wanted = question.length / question.trained
        return next(
            (measured.at_multiple(question.family, n) for n in multiples if n >= wanted), None
        )
    return (
        measured.at_trained_length(question.family)
        or measured.after_300_updates(question.family)[0]
    )


def answer_question(question: ChooseQuestion) -> str:
    """Answer in Markdown: what was measured first, then no more than follows from it."""
    column, setting = choose_column(question), measured.setting(question.family)
    asked = f"trained at {question.trained:,} tokens, read at {question.length:,}"
    if column is None:
        return f"Asked: {asked}. This was {measured.NOT_MEASURED}; {_advise_training(question)}"
    best, same, behind = column.best()
    models = setting.models if setting else "small models, 300 updates, one seed"
    if setting and setting.covers(question.length, question.trained):
        head = f"Asked: {asked}, as measured. The figures are of such small models only:"
        front = [f"- best there: {_join_names([best])}, {column.show(best)}"]
        front += _format_line("not significantly different from it", same)
    else:
        head = (
            f"Asked: {asked}. No winner is named: nothing was trained and read like that. The "
            "small models suggest whom to try:"
        )
        front = _format_line("in front there, without a significant difference", [best, *same])
    unread = [name for name in column.figures if math.isinf(column.figures[name].mean)]
    unknown = [
        name for name in measured.encoding_names(question.family) if name not in column.figures
    ]
    better = "higher" if column.higher else "lower"
    lines = [
        f"Measured: {models}; {column.title} ({column.source}), where {better} is better.",
        "",
        head,
        "",
        *front,
        *_format_line("significantly behind", behind),
        *_format_line("cannot be read there", unread),
        *_format_line(measured.NOT_MEASURED, unknown),
        "",
        f"To know it for your text, {_advise_training(question)}",
    ]
    return "\n".join(
        [*lines, "", tables.format_table(question.family, [best, *same, *behind, *unread])]
    )


def choose_candidates(question: ChooseQuestion) -> list[str]:
    """Choose what to train where a user names none: those with the best figures.

    Those that decide come first, then those of one seed.
    """
    columns = (choose_column(question), measured.after_300_updates(question.family)[0])
    ranked = [name for column in columns if column for name in column.ranked()]
    known = measured.encoding_names(question.family)
    first = [name for name in dict.fromkeys(ranked) if name in known]
    return [*first, *(name for name in known if name not in first)][:_FEW]


def _advise_training(question: ChooseQuestion) -> str:
    if question.family == measured.BOTH:
        return "train candidates on it: `fairseq-posenc train-recipe translation_iwslt17`."
    lengths = f"--length {question.length} --trained {question.trained}"
    command = f"fairseq-posenc choose --family {question.family} {lengths} --text my.txt"
    return f"train candidates on it: `{command} --budget 30m`."


def _format_line(what: str, names: list[str]) -> list[str]:
    return [f"- {what}: {_join_names(names)}"] if names else []


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
