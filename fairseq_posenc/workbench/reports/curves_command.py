"""``fairseq-posenc learning-curves``: tables and pictures of training logs.

``rope=a.log,b.log none=c.log`` are two trainings, the first with two seeds.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.reports.curve_tables import collect_figures, format_all_tables
from fairseq_posenc.workbench.results import learning_curves
from fairseq_posenc.workbench.results.intervals import interval, interval_of_perplexity
from fairseq_posenc.workbench.results.markdown import escape
from fairseq_posenc.workbench.results.pictures import Line, can_draw
from fairseq_posenc.workbench.results.record import Record, make_folder, own_command
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.options import add_json, add_out, parse_named, split_trainings
from fairseq_posenc.workbench.running.progress import say

# Files in the folder of the results; the pictures show the validations and the training loss.
_TABLES, _RECORD = "curves.md", "curves.json"
_VALIDATIONS, _TRAINING = "curves.png", "training.png"


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
    trainings = {name: [_read_log(name, Path(path)) for path in logs[name]] for name in logs}
    make_folder(args.out)
    text = format_all_tables(trainings)
    data = {name: ",".join(paths) for name, paths in logs.items()}
    record = Record("curves", collect_figures(trainings), data, command=own_command())
    record.write(args.out / _RECORD)
    print(record.text() if args.json else text)
    pictures = {
        _VALIDATIONS: (args.title, learning_curves.validation_line, interval_of_perplexity),
        _TRAINING: ("Training loss in nats", learning_curves.training_line, interval),
    }
    written = "tables (the log has no lines in --updates)"
    if not can_draw():
        pictures = {}
        written = "tables (pictures need matplotlib)"
    for file, (title, collect_points, average) in pictures.items():
        lines = {}
        for name, curves in trainings.items():
            seeds = []
            for curve in curves:
                points = collect_points(curve)
                seeds.append([(update, y) for update, y in points if first <= update <= last])
            lines[name] = Line.over_seeds(seeds, average)
            if file == _TRAINING:  # it has too many points for dots
                lines[name] = Line(lines[name].mean)
        # Perplexities are drawn on a logarithmic axis.
        if learning_curves.draw_curves(lines, title, args.out / file, log=file == _VALIDATIONS):
            text += f"\n![{escape(title)}]({file})\n"
            written = "tables and pictures"
    write_whole(args.out / _TABLES, text)
    say(f"{written}: {args.out}")
    return 0


def _read_log(name: str, log: Path) -> Curve:
    """Read a log of a training; refuse one without a validation."""
    if not log.is_file():
        raise UserError(f"{name}: the log {log} does not exist")
    curve = read_curve_file(log)
    if not curve.entries:
        raise UserError(f"{name}: {log} has no validation; fairseq-train logs one per epoch")
    return curve


def _parse_updates(text: Optional[str]) -> tuple[float, float]:
    """Parse the first and the last update to draw."""
    match = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if match is None:
        raise UserError(f"--updates {text}: write FIRST:LAST, as in 0:16000")
    return float(match[1] or 0), float(match[2] or math.inf)
