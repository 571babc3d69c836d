"""``fairseq-posenc lm-length``: perplexity of causal language models against context length."""

from __future__ import annotations

import argparse

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.length import report
from fairseq_posenc.workbench.experiments.length.checkpoint import (
    NamedCheckpoint,
    load,
    parse_checkpoints,
)
from fairseq_posenc.workbench.experiments.length.scoring import EvaluationPlan, evaluate
from fairseq_posenc.workbench.experiments.length.stream import read_dictionary, read_stream
from fairseq_posenc.workbench.results.pictures import can_draw
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import Computing
from fairseq_posenc.workbench.running.exit_codes import CONTINUES, signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.locks import lock_output_folder
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs

REPORT, FIGURES, PICTURE = "lm-length.md", "lm-length.json", "lm-length.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="NAME=CHECKPOINT[@SPEC]",
        help="a checkpoint and what to call it; with @SPEC it is read with other options of its "
        "position encoding, as in 'yarn=model.pt@rope(scaling=yarn:4)'",
    )
    options.add_data(parser, "data that fairseq-preprocess --only-source made", required=True)
    options.add_split(parser, "valid")
    options.add_lengths(parser, "context lengths", "64,128,256,512,1024")
    add(
        "--mode",
        choices=(*report.MODES, "both"),
        default="both",
        help="how texts are cut (default: both)",
    )
    options.add_count(parser, "--stride", "tokens that the sliding window moves", 64)
    options.add_count(parser, "--max-tokens", "tokens to read at a time", 4096)
    options.add_out(parser, "lm-length")
    options.add_computing(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Score all models, write the table, the figures and the picture; return the exit code.

    Raises:
        UserError: wrong input.
    """
    modes = report.MODES if args.mode == "both" else (args.mode,)
    strides = {mode: args.stride if mode == report.SLIDING else None for mode in modes}
    plan = EvaluationPlan(list(args.lengths), strides, args.max_tokens)
    if report.SLIDING in modes and args.stride > (shortest := plan.lengths[0]):
        raise UserError(
            f"--stride {args.stride} is more than the context length {shortest}: tokens in "
            "between would not be scored; choose a smaller stride"
        )
    how = Computing.chosen(args.device, args.fp16, args.bf16)
    checkpoints = parse_checkpoints(args.models)
    dictionary = read_dictionary(args.data)
    stream = read_stream(args.data, args.split, dictionary)
    if (longest := plan.lengths[-1]) > len(stream):
        raise UserError(
            f"--lengths {longest}: the split {args.split} has only {len(stream):,} tokens"
        )
    with (
        signals_as_keyboard_interrupt(CONTINUES),
        lock_output_folder(args.out, (REPORT, FIGURES, PICTURE)),
    ):
        for named in checkpoints:  # so that a wrong one is an error before the first is measured
            load(named, args.data)
        say(f"{len(stream):,} tokens of {args.data / args.split}, all scored once for each figure")
        rows = []
        for named in checkpoints:
            loaded = load(named, args.data, how)
            inputs = _inputs(named, args, how)
            scores = evaluate(loaded, stream, plan, args.out / named.name, inputs)
            facts = loaded.encoding, loaded.trained_length, loaded.updates
            rows.append(report.ModelScores(named, *facts, scores))
        results = report.LengthResults(args.data, args.split, len(stream), args.stride, rows)
        found = report.record(results)
        found.write(args.out / FIGURES)
        drawn = can_draw() and report.draw(results, args.out / PICTURE)
        report.write_markdown(results, args.out / REPORT, PICTURE if drawn else "")
    print(found.text() if args.json else report.table(results))
    say(f"report: {args.out / REPORT}" + ("" if drawn else " (no picture)"))
    return 0


def _inputs(named: NamedCheckpoint, args: argparse.Namespace, how: Computing) -> Outputs:
    """Collect the inputs of the figures, without their lengths."""
    text = [args.data / name for name in ("dict.txt", f"{args.split}.idx", f"{args.split}.bin")]
    return {
        "checkpoint": checksum(named.path),
        "override": str(named.override),
        "text": [checksum(path) for path in text],
        "precision": str(how.dtype),
        "version": __version__,
    }
