"""The command ``fairseq-posenc``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc import doctor
from fairseq_posenc.analysis import catalogue, pages
from fairseq_posenc.compare import command as compare
from fairseq_posenc.curves import command as curves
from fairseq_posenc.errors import UserError
from fairseq_posenc.glue import command as glue
from fairseq_posenc.initialise import command as initialise
from fairseq_posenc.length import command as length
from fairseq_posenc.plan import command as plan
from fairseq_posenc.report import command as report
from fairseq_posenc.squad import command as squad
from fairseq_posenc.translation import command_bleu, command_translate
from fairseq_posenc.version import __version__


class Command(NamedTuple):
    """A subcommand: what it does in a line, its options, and the function that runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def _user_dir(args: argparse.Namespace) -> int:
    print(Path(__file__).resolve().parent)
    return 0


COMMANDS = {
    "user-dir": Command("print the path to give fairseq as --user-dir", _no_arguments, _user_dir),
    "list": Command(
        "list the position encodings", catalogue.add_list_arguments, catalogue.run_list
    ),
    "describe": Command(
        "say what an encoding computes and costs",
        catalogue.add_describe_arguments,
        catalogue.run_describe,
    ),
    "count": Command(
        "count position parameters, on real modules",
        catalogue.add_count_arguments,
        catalogue.run_count,
    ),
    "compare": Command(
        "train models that differ in their positions only, on a text, and report",
        compare.add_arguments,
        compare.run,
    ),
    "curves": Command(
        "show the learning curves of trainings, from their logs",
        curves.add_arguments,
        curves.run,
    ),
    "translate": Command(
        "translate sentences with a trained model",
        command_translate.add_arguments,
        command_translate.run,
    ),
    "bleu": Command(
        "measure translation models on a test set, with BLEU and chrF",
        command_bleu.add_arguments,
        command_bleu.run,
    ),
    "lm-length": Command(
        "measure the perplexity of causal language models against context length",
        length.add_arguments,
        length.run,
    ),
    "init": Command(
        "make a start checkpoint from a trained RoBERTa, with other positions",
        initialise.add_arguments,
        initialise.run,
    ),
    "squad": Command(
        "fine-tune a model on SQuAD, answer its questions, score answers",
        squad.add_arguments,
        squad.run,
    ),
    "plan": Command(
        "measure the first updates of a training: speed, memory, hours to its end",
        plan.add_arguments,
        plan.run,
    ),
    "glue": Command(
        "fine-tune a pre-trained masked LM on the tasks of GLUE, and report",
        glue.add_arguments,
        glue.run,
    ),
    "report": Command(
        "put results into the layouts of the papers' tables, beside their numbers",
        report.add_arguments,
        report.run,
    ),
    "docs": Command(
        "write the generated parts of the documentation", pages.add_arguments, pages.run
    ),
    "doctor": Command(
        "say what works on this machine, and test it", doctor.add_arguments, doctor.run
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    A :class:`~fairseq_posenc.errors.UserError` becomes one line on standard error and code 2. If
    whoever reads the output has enough, as ``head`` has at some time, the command ends quietly.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # at Python's exit it would be too late to notice
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="fairseq-posenc", description="Position encodings as parts of fairseq's Transformers."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(
            subparsers.add_parser(name, help=command.help, description=command.help)
        )
    args = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.WARNING)  # importing fairseq turns everything on
    try:
        return COMMANDS[args.command].run(args)
    except UserError as error:
        print(f"fairseq-posenc: error: {error}", file=sys.stderr)
        return 2
