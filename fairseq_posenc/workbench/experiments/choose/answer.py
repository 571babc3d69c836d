"""The answer of the records: what was measured, on what, and the best figure within that.

``evidence.json`` has all of it by family; ``make docs`` writes it from the records in
``docs/results``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc import registry
from fairseq_posenc.workbench.experiments.variants import BOTH, CAUSAL

EVIDENCE = Path(__file__).with_name("evidence.json")
NOT_MEASURED = "not measured"
_FEW = 8  # candidates to train where a user names none


class ChooseQuestion(NamedTuple):
    """What a user asks."""

    family: str  # masked-lm, causal-lm or encoder-decoder
    length: int  # tokens in an input
    trained: int  # the length of training


class Figures(NamedTuple):
    """The measured figure that decides an answer, and the encodings by it."""

    title: str  # name of the figure
    source: str  # file names of the records
    better: str  # `higher` or `lower`
    ranked: list[str]  # all that were measured, from the best on
    best: str  # the best of all
    shown: str  # its figure
    same: list[str]  # not significantly different from the best
    behind: list[str]  # significantly worse than the best
    unread: list[str]  # cannot read such inputs


class Evidence(NamedTuple):
    """What was measured of a family of models."""

    models: str  # size, text, updates and seeds, in words
    trained: int  # input length in training, in tokens; 0 where each sentence has its own
    longest: int  # longest input in evaluation, in tokens; in words for sentences
    figures: dict[str, Figures]  # by the multiple of the length of training, `1` first
    one_seed: list[str]  # encodings by their loss after a short training, from the best on
    table: list[str]  # the two lines of a table's head, in Markdown
    rows: dict[str, str]  # the table's row of each encoding


def read_evidence(family: str) -> Evidence:
    """Read what was measured of a family."""
    content = json.loads(EVIDENCE.read_text(encoding="utf-8"))[family]
    figures = {times: Figures(**entry) for times, entry in content.pop("figures").items()}
    return Evidence(**content, figures=figures)


def find_figures(question: ChooseQuestion, evidence: Evidence) -> Optional[Figures]:
    """Find the figures that decide an answer; None if nothing was measured.

    Beyond the length of training they are those at the least multiple that is as far or further.
    """
    wanted = question.length / question.trained
    return next((entry for times, entry in evidence.figures.items() if int(times) >= wanted), None)


def answer_question(question: ChooseQuestion) -> str:
    """Answer in Markdown: what was measured first, then no more than follows from it."""
    evidence = read_evidence(question.family)
    figures = find_figures(question, evidence)
    asked = f"trained at {question.trained:,} tokens, read at {question.length:,}"
    if figures is None:
        return f"Asked: {asked}. This was {NOT_MEASURED}; {_advise_training(question)}"
    best, same, behind, unread = figures.best, figures.same, figures.behind, figures.unread
    if question.length <= evidence.longest and evidence.trained in (0, question.trained):
        head = f"Asked: {asked}, as measured. The figures are of such small models only:"
        front = [f"- best there: `{best}`, {figures.shown}"]
        front += _format_line("not significantly different from it", same)
    else:
        head = (
            f"Asked: {asked}. No winner is named: nothing was trained and read like that. The "
            "small models suggest whom to try:"
        )
        front = _format_line("in front there, without a significant difference", [best, *same])
    unknown = [name for name in list_names(question.family) if name not in figures.ranked]
    lines = [
        f"Measured: {evidence.models}; {figures.title} ({figures.source}), where {figures.better} "
        "is better.",
        "",
        head,
        "",
        *front,
        *_format_line("significantly behind", behind),
        *_format_line("cannot be read there", unread),
        *_format_line(NOT_MEASURED, unknown),
        "",
        f"To know it for your text, {_advise_training(question)}",
        "",
        *evidence.table,
        *(evidence.rows[name] for name in (best, *same, *behind, *unread)),
    ]
    return "\n".join(lines)


def choose_candidates(question: ChooseQuestion) -> list[str]:
    """Choose what to train where a user names none: those with the best figures.

    Those that decide come first, then those of one seed.
    """
    evidence, known = read_evidence(question.family), list_names(question.family)
    figures = find_figures(question, evidence)
    ranked = [*(figures.ranked if figures else []), *evidence.one_seed, *known]
    return [name for name in dict.fromkeys(ranked) if name in known][:_FEW]


def list_names(family: str) -> list[str]:
    """List the encodings that work in a family."""
    return registry.names(encoder=family != CAUSAL)


def _advise_training(question: ChooseQuestion) -> str:
    if question.family == BOTH:
        return "train candidates on it: `fairseq-posenc train-recipe translation_iwslt17`."
    lengths = f"--length {question.length} --trained {question.trained}"
    command = f"fairseq-posenc choose --family {question.family} {lengths} --text my.txt"
    return f"train candidates on it: `{command} --budget 30m`."


def _format_line(what: str, names: list[str]) -> list[str]:
    return [f"- {what}: {', '.join(f'`{name}`' for name in names)}"] if names else []
