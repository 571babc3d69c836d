"""Answers which positions a trained model can be given: ``choose --from-trained``.

The answer comes from measurements of the project; the user's model is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.choose.answer import (
    BEST,
    EVIDENCE,
    SAME,
    ChooseQuestion,
    Measurement,
    rank,
)
from fairseq_posenc.workbench.experiments.variants import CAUSAL, join_list
from fairseq_posenc.workbench.results import markdown

KEY = "from trained"  # has the changes in ``evidence.json``, by family
_COMPARE_COMMAND = (
    "fairseq-posenc lm-length --text my.txt --lengths {length} --windows 8 own=FOLDER "
    "'yarn=FOLDER@own(scaling=yarn:2)'"
)
_SWAP_COMMAND = "fairseq-posenc swap --checkpoint FILE --position-encoding SPEC --out NEW"


class Change(NamedTuple):
    """A measurement of trained models that were given other positions."""

    models: str  # description of the models
    kept: str  # the encoding that they had
    up_to: float  # decides for texts of up to so many tokens; infinite (null in JSON) for all
    measurement: Measurement  # of all encodings, the kept one included


def read_changes(family: str) -> list[Change]:
    """Read what a change of positions does to trained models of a family."""
    content = json.loads(EVIDENCE.read_text(encoding="utf-8"))[KEY][family]
    return [
        Change(models, kept, math.inf if up_to is None else up_to, Measurement(**figures))
        for models, kept, up_to, figures in content
    ]


def select_for_length(changes: Iterable[Change], length: int) -> Iterator[Change]:
    """Select the change of each set of models that decides for a length, or for the longest one."""
    by_models: dict[str, list[Change]] = {}
    for change in changes:
        by_models.setdefault(change.models, []).append(change)
    for same_models in by_models.values():
        same_models.sort(key=lambda change: change.up_to)
        long_enough = [change for change in same_models if change.up_to >= length]
        yield long_enough[0] if long_enough else same_models[-1]


def answer_from_trained(question: ChooseQuestion) -> str:
    """Answer in Markdown: a recommendation, and a table for each measurement.

    Raises:
        UserError: none of the requested encodings was measured.
    """
    parts = []
    better = []  # encodings that were better than the kept one, and where
    changes = select_for_length(read_changes(question.family), question.length)
    for models, kept, _, measurement in changes:
        names = (*question.names, kept) if question.names else None
        ranking = rank(measurement, names)
        if not ranking.verdicts.keys() - {kept}:  # none of the requested ones was measured here
            continue
        if ranking.verdicts[kept] not in (BEST, SAME):
            better.append(f"`{ranking.best}` in place of `{kept}` ({measurement.title})")
        rows = [
            (f"`{name}` (kept)" if name == kept else f"`{name}`", ranking.show(name), verdict)
            for name, verdict in ranking.verdicts.items()
        ]
        table = markdown.table(("encoding", measurement.scale.name, "compared"), rows, "lrl")
        parts += [f"{models}. The figure is {measurement.title}.", table]
    if not parts:
        raise UserError(
            f"--encodings {join_list(question.names)}: none of these was measured after a change; "
            "leave the option out to see those that were"
        )
    head = "Keep the positions that the model has: no other ones were significantly better."
    if better:
        head = f"Significantly better than the kept positions: {'; '.join(better)}."
    command = (
        _COMPARE_COMMAND.format(length=question.length)
        if question.family == CAUSAL
        else _SWAP_COMMAND
    )
    advice = f"To find out what a change does to your model:\n\n    {command}"
    return "\n\n".join([f"{head} {advice}", *parts])
