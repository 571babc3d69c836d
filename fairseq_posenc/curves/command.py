"""``fairseq-posenc curves``: the learning curves of trainings, as a table and a picture."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_posenc.curves.picture import can_draw, draw_curves
from fairseq_posenc.errors import UserError
from fairseq_posenc.running.logs import Curve, read_curve_file
from fairseq_posenc.running.steps import write_whole

TABLE, PICTURE = "curves.md", "curves.png"


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
    add("--out", type=Path, default=Path("curves"), help="folder of the results (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write table and picture, print the table; return the exit code.

    Raises:
        UserError: wrong input.
    """
    curves = _read(args.logs)
    args.out.mkdir(parents=True, exist_ok=True)
    text = table(curves)
    print(text)
    if can_draw():
        draw_curves(curves, args.title, args.out / PICTURE)
        text += f"\n![{args.title}]({PICTURE})\n"
    write_whole(args.out / TABLE, text)
    print(f"table and picture: {args.out}" if can_draw() else f"table: {args.out} (no picture)")
    return 0


def table(curves: Mapping[str, Curve]) -> str:
    """Return the best validation of each training, as Markdown."""
    accuracies = any(curve.best.accuracy is not None for curve in curves.values())
    columns = ["training", "updates", "best at", "loss (bits)", "loss (nats)"]
    columns += ["perplexity", "tokens/s"]
    if accuracies:
        columns.insert(6, "accuracy")
    rows = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
    for name, curve in curves.items():
        best = curve.best
        row = [f"`{name}`", f"{curve.entries[-1].updates:,}", f"{best.updates:,}"]
        row += [f"{best.loss:.3f}", f"{best.nats:.3f}", f"{best.perplexity:,.2f}"]
        row.append(f"{curve.speed:,.0f}" if curve.speed else "-")
        if accuracies:
            row.insert(6, "-" if best.accuracy is None else f"{best.accuracy:.1f} %")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
