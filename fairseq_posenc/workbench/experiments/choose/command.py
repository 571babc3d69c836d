"""``fairseq-posenc choose``: recommends an encoding, from measurements or by training on a text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.experiments.choose import report
from fairseq_posenc.workbench.experiments.choose.answer import (
    ChooseQuestion,
    answer_question,
    choose_candidates,
)
from fairseq_posenc.workbench.experiments.choose.halving import Halving
from fairseq_posenc.workbench.experiments.corpus import check_text
from fairseq_posenc.workbench.experiments.text_experiment import TextSettings
from fairseq_posenc.workbench.experiments.variants import BOTH, FAMILIES, MASKED, parse_variants
from fairseq_posenc.workbench.results import terminal
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.locks import lock_output_folder
from fairseq_posenc.workbench.running.progress import format_time, say

_UNITS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(\d+)([smh])")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--family", choices=FAMILIES, required=True, help="kind of models")
    add(
        "--length",
        type=options.positive_int,
        required=True,
        metavar="N",
        help="input length in tokens",
    )
    options.add_count(parser, "--trained", "length of training, in tokens (default: --length)")
    add(
        "--text",
        type=Path,
        help="UTF-8 text to train candidates on (default: answer from measurements)",
    )
    add(
        "--budget",
        metavar="TIME",
        default="30m",
        help="time for the trainings, as in 90s, 30m, 2h (default: %(default)s)",
    )
    add("--encodings", help="candidates, separated by commas (default: the best measured ones)")
    options.add_seeds(parser, (1, 2, 3))
    options.add_count(parser, "--vocab-size", "number of sentencepieces", 512)
    options.add_jobs(parser, "one per core, or one on the GPU")
    options.add_place(parser)
    options.add_out(parser, computed_default="choose-NAME for --text NAME.txt")
    add("--markdown", action="store_true", help="print Markdown, as in choose.md")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; return the exit code.

    Raises:
        UserError: wrong input, or a command of fairseq failed.
    """
    variants = parse_variants(args.encodings) if args.encodings else ()
    names = tuple(variant.name for variant in variants)
    question = ChooseQuestion(args.family, args.length, args.trained or args.length, names)
    show: Callable[[str], str] = str if args.markdown else terminal.show
    _refuse_wrong_options(question, args)
    if args.text is None:
        print(show(answer_question(question)))
        return 0
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
    print(record.text() if args.json else show(text))
    say(f"report: {settings.out / report.REPORT}")
    return 0


def _refuse_wrong_options(question: ChooseQuestion, args: argparse.Namespace) -> None:
    if question.length < question.trained:
        raise UserError(
            f"--trained {question.trained} is more than --length {question.length}: set --length "
            "to the longest text to read"
        )
    if args.text is None:
        if args.json:
            raise UserError("--json: needs --text; the records are in docs/results")
    elif question.family == BOTH:
        raise UserError(
            "--text: is for language models; prepare translations with 'fairseq-posenc "
            "preprocess translation', and train with 'fairseq-posenc train-recipe "
            "translation_iwslt17'"
        )
    elif question.family == MASKED and question.length != question.trained:
        raise UserError("--trained: masked-lm candidates are evaluated at the length in training")


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
