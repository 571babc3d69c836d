"""Chooses an encoding by training candidates on a text, by successive halving."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.experiments.choose import report
from fairseq_posenc.workbench.experiments.choose.answer import ChooseQuestion, choose_candidates
from fairseq_posenc.workbench.experiments.choose.halving import Halving
from fairseq_posenc.workbench.experiments.corpus import check_text
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.locks import lock_output_folder
from fairseq_posenc.workbench.running.progress import format_time, say

_UNITS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(\d+)([smh])")


def train_candidates(question: ChooseQuestion, args: argparse.Namespace) -> tuple[Record, str]:
    """Train candidates, and write a report and a record; return the record and the report's text.

    Raises:
        UserError: wrong input, or a command of fairseq failed.
    """
    experiment, budget = _build_experiment(question, args), _parse_seconds(args.budget)
    check_text(args.text)  # so that an unusable text is refused before anything is written
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(experiment.out, (report.REPORT, report.RECORD)) as lock,
    ):
        candidates, limit = ", ".join(experiment.names), format_time(budget)
        say(f"{candidates} on {args.text} within {limit}; results: {experiment.out}/")
        halving = Halving(experiment, budget, lock)
        rounds = halving.run()
        text = report.describe_rounds(rounds, experiment, halving.estimate_budget(rounds))
        record = report.build_record(rounds, experiment)
        record.write(experiment.out / report.RECORD)
        write_whole(
            experiment.out / report.REPORT, f"# Which encoding\n\n{text}\n\n    {record.command}\n"
        )
    say(f"report: {experiment.out / report.REPORT}")
    return record, text


def _build_experiment(question: ChooseQuestion, args: argparse.Namespace) -> TextExperiment:
    listed = args.encodings or ",".join(choose_candidates(question))
    variants = parse_variants(listed)
    if len(variants) < 2:
        raise UserError(f"--encodings {listed}: name two or more candidates")
    return TextExperiment.from_args(
        args,
        out=args.out or Path(f"choose-{args.text.stem}"),
        variants=variants,
        updates=1,
        eval_length=question.length,
        points=2,
        train_args=(*args.after_dashes, "--tokens-per-sample", str(question.trained)),
    )


def _parse_seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise UserError(f"--budget {text}: write a time, as in 90s, 30m or 2h")
    return float(int(match[1]) * _UNITS[match[2]])
