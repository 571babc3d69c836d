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
from fairseq_posenc.workbench.experiments.text_experiment import TextSettings
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
    settings, budget = _build_settings(question, args), _parse_seconds(args.budget)
    check_text(args.text)  # so that an unusable text is refused before anything is written
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(settings.out, (report.REPORT, report.RECORD)) as lock,
    ):
        candidates, limit = ", ".join(settings.names), format_time(budget)
        say(f"{candidates} on {args.text} within {limit}; results: {settings.out}/")
        halving = Halving(settings, budget, lock)
        rounds = halving.run()
        text = report.describe_rounds(rounds, settings, halving.estimate_budget(rounds))
        record = report.build_record(rounds, settings)
        record.write(settings.out / report.RECORD)
        write_whole(
            settings.out / report.REPORT, f"# Which encoding\n\n{text}\n\n    {record.command}\n"
        )
    say(f"report: {settings.out / report.REPORT}")
    return record, text


def _build_settings(question: ChooseQuestion, args: argparse.Namespace) -> TextSettings:
    listed = args.encodings or ",".join(choose_candidates(question))
    variants = parse_variants(listed)
    if len(variants) < 2:
        raise UserError(f"--encodings {listed}: name two or more candidates")
    return TextSettings.from_args(
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
