"""``fairseq-posenc bleu``: evaluates translation models on a test set."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.folders import lock_folder
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation.command_translate import add_model_arguments
from fairseq_posenc.workbench.translation.evaluation import BleuRequest, evaluate, parse_systems
from fairseq_posenc.workbench.translation.generate import GenerationOptions, Search
from fairseq_posenc.workbench.translation.report import FIGURES, REPORT, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = (
        "a checkpoint (':' joins several to an ensemble), a folder of checkpoints with --average, "
        "or a text file with one translation per line; commas join trainings of one model with "
        "different seeds; the other systems are compared with the first"
    )
    add("systems", nargs="+", metavar="NAME=PATH[,PATH...]", help=text)
    options.add_out(parser, "bleu")
    text = (
        "raw text of the test set in the target language, may be gzipped "
        "(default: SPLIT.raw.LANGUAGE in the data folder)"
    )
    add("--reference", type=Path, metavar="FILE", help=text)
    text = "the same in the source language, for BLEU by length of the source"
    add("--source", type=Path, metavar="FILE", help=text)
    add_model_arguments(parser)  # --beam and --lenpen are among them
    add("--split", default="test", help="split of the data (default: %(default)s)")
    options.add_computing(parser, bf16=False)  # fairseq-generate ignores --bf16
    options.add_count(parser, "--average", "average the checkpoints of the last N epochs")
    text = "parts of the test set; an interrupted evaluation resumes with the next part"
    options.add_count(parser, "--num-shards", text, default=4)
    options.add_count(parser, "--max-tokens", "source tokens translated at a time", default=12000)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate and report; return the exit code.

    Raises:
        UserError: wrong input.
        RunError: ``fairseq-generate`` failed.
    """
    choose_device(args.device, args.fp16)  # refused now, not in each part
    request = options.build_settings(
        BleuRequest,
        args,
        trainings=parse_systems(args.systems, args.average),
        # Greedy search, too, for comparison.
        searches=[Search(beam, args.lenpen) for beam in sorted({1, args.beam})],
        options=options.build_settings(GenerationOptions, args),
    )
    with signals_as_keyboard_interrupt(), lock_folder(args.out) as lock:
        record = evaluate(request, args.out, lock)
        report = write_report(record, args.out)
    print(record.text() if args.json else report)
    say(f"report: {args.out / REPORT}, figures: {args.out / FIGURES}")
    return 0
