"""``fairseq-posenc choose``: which encoding to use, looked up in the project's measurements.

``choose.json`` has an answer for each family of models and each length that was measured, from the
records in ``docs/results``; ``docs/choose.md`` shows all figures. For new models it lists encodings
in the order of their figures, and ends before the first that is significantly worse than the best.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.variants import FAMILIES, TRANSLATION
from fairseq_posenc.workbench.results.record import group_by
from fairseq_posenc.workbench.running import options

TABLE = Path(__file__).with_name("choose.json")
Figures = dict[str, str]  # encoding -> figure, such as `15.94 (14.12 to 18.00)`


class Advice(NamedTuple):
    """The encodings to use in one case."""

    models: str  # the measured models: size, text, updates and seeds
    figure: str  # what was measured
    up_to: float  # longest text, as a multiple of the training length
    encodings: int  # how many were measured; for trained models, without the one they had
    best: Figures | None = None  # for new models: the one with the best figure
    others: Figures | None = None  # for new models: those not significantly worse
    fast: Figures | None = None  # best one whose layer is at most 10 % slower than that of `none`
    before: Figures | None = None  # for trained models: the one they had
    better: Figures | None = None  # for trained models: those significantly better


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--family", choices=FAMILIES, required=True, help="kind of models")
    options.add_count(parser, "--length", "longest input in tokens (default: --trained)")
    options.add_count(parser, "--trained", "training length, in tokens (default: --length)")
    trained_help = "for models that are trained already, and get other positions"
    parser.add_argument("--from-trained", action="store_true", help=trained_help)


def run(args: argparse.Namespace) -> None:
    """Print the answer.

    Raises:
        UserError: a length is missing, or too short.
    """
    trained = args.trained or args.length
    if not trained or (args.length or trained) < trained:
        raise UserError("--length: give the longest text to read, in tokens; at least --trained")
    key = "from trained" if args.from_trained else "new"  # the keys of choose.json
    ratio = (args.length or trained) / trained  # as `up_to` of an answer
    print("\n\n".join(describe(x, ratio) for x in find_answers(key, args.family, ratio)))
    advice = f"train candidates on yours: fairseq-posenc compare --family {args.family} --text FILE"
    if args.from_trained:
        advice = "try a change on yours: docs/hf.md (transformers), docs/exchange.md (fairseq)"
    elif args.family == TRANSLATION:
        advice = "train candidates on yours (docs/training.md)"
    print(f"\nThis was measured on little text: {advice}")


def find_answers(key: str, family: str, ratio: float) -> list[Advice]:
    """Find the answers of the next longer measurements, or else of the longest ones."""
    rows = [Advice(**row) for row in json.loads(TABLE.read_text("utf-8"))[key][family]]
    models = group_by(rows, lambda row: row.models)  # in each, `up_to` ascends
    answers = [next((x for x in same if x.up_to >= ratio), same[-1]) for same in models.values()]
    reached = min(ratio, max(answer.up_to for answer in answers))  # shorter answers are left out
    return [answer for answer in answers if answer.up_to >= reached]


def describe(answer: Advice, ratio: float) -> str:
    """Describe which encoding to use for new models, or which positions to give trained ones."""
    before, figure, count = _join(answer.before), answer.figure, answer.encodings
    if answer.better:
        parts = [f"Change {before} to {_join(answer.better)}: significantly better ({figure})."]
    elif answer.before:
        parts = [f"Keep {before}: none of {count} others is significantly better ({figure})."]
    else:  # for new models
        parts = [f"Use {_join(answer.best)}: the best {figure} of {count} encodings."]
        if answer.others:
            parts.append(f"Not significantly worse: {_join(answer.others)}.")
        else:
            parts.append("The next is significantly worse (paired by seed; intervals may overlap).")
    if answer.fast:
        parts.append(f"If speed matters, use {_join(answer.fast)}.")
    if ratio > answer.up_to:
        parts.append("Longer inputs were not measured.")
    return "\n".join([*parts, f"Measured on {answer.models}."])


def _join(figures: Figures | None) -> str:
    return ", ".join(f"{name} {figure}" for name, figure in (figures or {}).items())
