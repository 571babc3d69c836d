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
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.workbench.reports.curve_tables import (
    Trainings,
    collect_figures,
    format_tables,
)
from fairseq_posenc.workbench.results import intervals, pictures
from fairseq_posenc.workbench.results.loss_stages import smooth_losses
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.options import add_json, add_out, parse_named, split_trainings
from fairseq_posenc.workbench.running.progress import say

Points = list[tuple[int, float]]  # updates and values
_TABLES, _RECORD = "curves.md", "curves.json"  # files in the folder of the results


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
    text = "part of the training to draw, as in 0:16000 or 80000: (default: all of it)"
    add("--updates", metavar="FIRST:LAST", help=text)
    add_out(parser, "curves")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the tables and pictures, print the tables; return the exit code."""
    updates = _parse_updates(args.updates)
    logs = {
        name: split_trainings(paths) for name, paths in parse_named(args.logs, "NAME=LOG").items()
    }
    trainings = {name: [_read_log(name, Path(path)) for path in logs[name]] for name in logs}
    data = {name: ",".join(paths) for name, paths in logs.items()}
    with lock_folder(args.out):
        tables = collect_figures(trainings)
        text = format_tables(tables)
        record = Record("curves", tables, data, command=own_command())
        record.write(args.out / _RECORD)
        print(record.text() if args.json else text)
        written = "tables (pictures need matplotlib)"
        if pictures.can_draw():
            drawn = _draw_pictures(trainings, updates, args.out)
            text += "".join(f"\n![{title}]({file})\n" for file, title in drawn.items())
            written = "tables and pictures" if drawn else "tables (no lines in --updates)"
        write_whole(args.out / _TABLES, text)
        say(f"{written}: {args.out}")
    return 0


def _draw_pictures(trainings: Trainings, updates: tuple[float, float], out: Path) -> dict[str, str]:
    """Draw validations and training losses between two updates; return the titles by file."""
    validations, losses = {}, {}
    for name, curves in trainings.items():
        seeds = [_select(curve.points, updates) for curve in curves]
        validations[name] = intervals.average_lines(seeds, intervals.interval_of_perplexity)
        seeds = [_select(smooth_losses(curve), updates) for curve in curves]
        losses[name] = intervals.average_lines(seeds, intervals.interval)
    drawn = {}
    for file, title, lines in (
        ("curves.png", "Validation perplexity", validations),
        ("training.png", "Training loss in nats", losses),
    ):
        if figure := pictures.draw_curves(lines, title, log=lines is validations):
            pictures.save(figure, out / file)
            drawn[file] = title
    return drawn


def _select(line: Points, updates: tuple[float, float]) -> Points:
    first, last = updates
    return [(update, value) for update, value in line if first <= update <= last]


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
