"""``fairseq-posenc learning-curves``: tables and pictures of training logs."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.reports.curve_tables import collect_figures, format_all_tables
from fairseq_posenc.workbench.results import intervals, learning_curves
from fairseq_posenc.workbench.results.markdown import escape
from fairseq_posenc.workbench.results.pictures import Line, can_draw
from fairseq_posenc.workbench.results.record import Record, make_folder, own_command
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.options import add_json, add_out, parse_named, split_trainings
from fairseq_posenc.workbench.running.progress import say

TABLE, RECORD = "curves.md", "curves.json"
PICTURE, TRAINING = "curves.png", "training.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "logs",
        nargs="+",
        metavar="NAME=LOG[,LOG...]",
        help="a log of fairseq-train, in any --log-format, or train.log of a training script; "
        "commas join trainings of one model with different seeds",
    )
    text = "title of the picture (default: %(default)s)"
    add("--title", default="Validation perplexity", help=text)
    text = "part of the training to draw, as in 0:16000 or 80000: (default: all of it)"
    add("--updates", metavar="FIRST:LAST", help=text)
    add_out(parser, "curves")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the tables and pictures, print the tables; return the exit code."""
    first, last = _parse_updates(args.updates)
    logs = {
        name: split_trainings(paths)
        for name, paths in parse_named(args.logs, "NAME=LOG", "trainings").items()
    }
    trainings: dict[str, list[Curve]] = {name: [] for name in logs}
    for name, log in ((name, path) for name, paths in logs.items() for path in paths):
        if not Path(log).is_file():
            raise UserError(f"{name}: the log {log} does not exist")
        trainings[name].append(read_curve_file(Path(log)))
        if not trainings[name][-1].entries:
            raise UserError(f"{name}: {log} has no validation; fairseq-train logs one per epoch")
    make_folder(args.out)
    text = format_all_tables(trainings)
    data = {name: ",".join(paths) for name, paths in logs.items()}
    record = Record("curves", collect_figures(trainings), data, command=own_command())
    record.write(args.out / RECORD)
    print(record.text() if args.json else text)
    pictures = {
        PICTURE: (args.title, learning_curves.validation_line, intervals.interval_of_perplexity),
        TRAINING: ("Training loss in nats", learning_curves.training_line, intervals.interval),
    }
    drawn = []
    for file, (title, collect_points, average) in pictures.items() if can_draw() else ():
        lines = {}
        for name, curves in trainings.items():
            seeds = [
                [point for point in collect_points(curve) if first <= point[0] <= last]
                for curve in curves
            ]
            lines[name] = Line.over_seeds(seeds, average)
            if file == TRAINING:  # which has too many points for dots
                lines[name] = Line(lines[name].mean)
        is_log = file == PICTURE  # the axis of perplexities is logarithmic
        if learning_curves.draw_curves(lines, title, args.out / file, is_log):
            drawn.append(f"\n![{escape(title)}]({file})\n")
    write_whole(args.out / TABLE, "".join([text, *drawn]))
    written = "tables and pictures" if drawn else "tables (the log has no lines in --updates)"
    if not can_draw():
        written = "tables (pictures need matplotlib)"
    say(f"{written}: {args.out}")
    return 0


def _parse_updates(text: Optional[str]) -> tuple[float, float]:
    """Parse the first and the last update to draw."""
    match = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if match is None:
        raise UserError(f"--updates {text}: write FIRST:LAST, as in 0:16000")
    return float(match[1] or 0), float(match[2] or math.inf)
