"""``fairseq-posenc lm-length``: perplexity of causal language models against context length."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.length.candidates import parse_candidates
from fairseq_posenc.length.checkpoint import load
from fairseq_posenc.length.evaluation import evaluate
from fairseq_posenc.length.picture import draw
from fairseq_posenc.length.report import (
    MODES,
    SLIDING,
    Results,
    Row,
    record,
    table,
    write_markdown,
)
from fairseq_posenc.length.stream import read_dictionary, read_stream
from fairseq_posenc.reporting.pictures import can_draw
from fairseq_posenc.running.locking import hold
from fairseq_posenc.running.progress import say

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
    add("--data", type=Path, required=True, help="folder made by fairseq-preprocess --only-source")
    add("--split", default="valid", help="split of the data (default: valid)")
    add("--lengths", default="64,128,256,512,1024", help="context lengths (default: %(default)s)")
    add("--mode", choices=(*MODES, "both"), default="both", help="evaluation (default: both)")
    add("--stride", type=int, default=64, help="of the sliding window, in tokens (default: 64)")
    add("--max-tokens", type=int, default=4096, help="tokens to read at a time (default: 4096)")
    add("--out", type=Path, default=Path("lm-length"), help="folder of the results (%(default)s)")
    add("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Score all models, write the table, the figures and the picture; return the exit code.

    Raises:
        UserError: wrong input.
    """
    lengths, strides = _lengths(args.lengths), _strides(args)
    _refuse_bad_sizes(args, lengths, strides)
    candidates = parse_candidates(args.models)
    dictionary = read_dictionary(args.data)
    stream = read_stream(args.data, args.split, dictionary)
    if lengths[-1] > len(stream):
        raise UserError(
            f"--lengths {lengths[-1]}: the split {args.split} has only {len(stream):,} tokens"
        )
    with hold(args.out):
        for candidate in candidates:  # so that a wrong one is told before the first is measured
            load(candidate, args.data, dictionary)
        say(f"{len(stream):,} tokens of {args.data / args.split}, all scored once for each figure")
        rows = []
        for candidate in candidates:
            loaded = load(candidate, args.data, dictionary)
            scores = evaluate(candidate.name, loaded, stream, lengths, strides, args.max_tokens)
            rows.append(Row.of(candidate, loaded, scores))
        results = Results(args.data, args.split, len(stream), args.stride, rows)
        found = record(results)
        found.write(args.out / FIGURES)
        drawn = can_draw() and draw(results, args.out / PICTURE)
        write_markdown(results, args.out / REPORT, PICTURE if drawn else "")
    print(found.text() if args.json else table(results))
    say(f"report: {args.out / REPORT}" + ("" if drawn else " (no picture)"))
    return 0


def _lengths(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--lengths {text}: write whole numbers, as in 64,128,256") from None


def _strides(args: argparse.Namespace) -> dict[str, int | None]:
    modes = MODES if args.mode == "both" else (args.mode,)
    return {mode: args.stride if mode == SLIDING else None for mode in modes}


def _refuse_bad_sizes(
    args: argparse.Namespace, lengths: list[int], strides: dict[str, int | None]
) -> None:
    for option, value in (
        ("--lengths", lengths[0]),
        ("--stride", args.stride),
        ("--max-tokens", args.max_tokens),
    ):
        if value < 1:
            raise UserError(f"{option} {value}: must be at least 1")
    if SLIDING in strides and args.stride > lengths[0]:
        raise UserError(
            f"--stride {args.stride} is more than the context length {lengths[0]}: tokens in "
            "between would not be scored; choose a smaller stride"
        )
