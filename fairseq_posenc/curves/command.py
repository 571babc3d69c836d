"""``fairseq-posenc curves``: the learning curves of trainings, as a table and a picture."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from fairseq_posenc.curves.tables import all_tables
from fairseq_posenc.errors import UserError
from fairseq_posenc.reporting.learning import draw_lines, training_line, validation_line
from fairseq_posenc.reporting.pictures import can_draw
from fairseq_posenc.reporting.record import make_folder
from fairseq_posenc.running.logs import Curve, read_curve_file
from fairseq_posenc.running.steps import write_whole

TABLE, PICTURE, TRAINING = "curves.md", "curves.png", "training.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "logs",
        nargs="+",
        metavar="NAME=LOG",
        help="what fairseq-train printed, in any --log-format; train.log of the training scripts",
    )
    add("--title", default="Validation perplexity", help="of the picture (default: %(default)s)")
    add(
        "--updates",
        metavar="FIRST:LAST",
        help="part of the training to draw, as in 0:16000 or 80000: (default: all of it)",
    )
    add("--out", type=Path, default=Path("curves"), help="folder of the results (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write table and picture, print the table; return the exit code.

    Raises:
        UserError: wrong input.
    """
    first, last = _part(args.updates)
    curves = _read(args.logs)
    make_folder(args.out)
    text = all_tables(curves)
    print(text)
    pictures = {
        PICTURE: (args.title, validation_line),
        TRAINING: ("Training loss in nats", training_line),
    }
    for file, (title, line_of) in pictures.items() if can_draw() else ():
        lines = {
            name: [point for point in line_of(curve) if first <= point[0] <= last]
            for name, curve in curves.items()
        }
        if draw_lines(lines, title, args.out / file, log=file == PICTURE):
            text += f"\n![{title}]({file})\n"
    write_whole(args.out / TABLE, text)
    print(f"tables and pictures: {args.out}" if can_draw() else f"tables: {args.out} (no pictures)")
    return 0


def _part(text: Optional[str]) -> tuple[float, float]:
    """Return the first and the last update to draw."""
    found = re.fullmatch(r"(\d*):(\d*)", text or ":")
    if found is None:
        raise UserError(f"--updates {text}: write FIRST:LAST, as in 0:16000")
    return float(found[1] or 0), float(found[2] or math.inf)


def _read(texts: Sequence[str]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for text in texts:
        # The name may be a spec itself, as in 'm4(max_distance=64)=train.log'.
        name, *rest = re.split(r"=(?![^(]*\))", text, maxsplit=1)
        if not name or not rest:
            raise UserError(f"cannot read {text!r}: write NAME=LOG")
        log = Path(rest[0])
        if not log.is_file():
            raise UserError(f"{name}: the log {log} does not exist")
        if name in curves:
            raise UserError(f"two trainings are called {name!r}: give each its own name")
        curves[name] = read_curve_file(log)
        if not curves[name].entries:
            raise UserError(f"{name}: {log} has no validation; fairseq-train prints one an epoch")
    return curves
