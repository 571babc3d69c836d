"""``fairseq-posenc learning-curves``: tables and pictures of training logs.

``rope=a.log,b.log none=c.log`` are two models, the first trained with two seeds.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.workbench.results import intervals, loss_stages, pictures
from fairseq_posenc.workbench.results.markdown import code, table
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running.logs import NATS_PER_BIT, Curve, read_curve_file
from fairseq_posenc.workbench.running.options import add_out, parse_named, split_paths
from fairseq_posenc.workbench.running.progress import say

CurvesByModel = Mapping[str, Sequence[Curve]]  # name of a model -> a curve for each seed
# Columns of the first table, with a row for each log: name in the record -> title and decimals.
_COLUMNS = {
    "updates": ("updates", 0),
    "best_at": ("best at", 0),
    "loss_bits": ("loss (bits)", 3),
    "loss_nats": ("loss (nats)", 3),
    "perplexity": ("perplexity", 2),
    "accuracy": ("accuracy", 1),
    "tokens_per_second": ("tokens/s", 0),
    "loss_at_the_end_nats": ("training loss at the end (nats)", 3),
}
_STAGE_COLUMNS = {
    "start_ends": ("start ends", 0),
    "plateau_ends": ("plateau ends", 0),
    "dive_ends": ("dive ends", 0),
    "plateau": ("length of the plateau", 0),
}
_SEED_COLUMNS = {name: _COLUMNS[name] for name in ("perplexity", "loss_at_the_end_nats")}
_SEED_COLUMNS |= {name: _STAGE_COLUMNS[name] for name in ("plateau_ends", "plateau")}
_MEANS = {"perplexity": intervals.interval_of_perplexity}  # by figure; of all others: `interval`
_STAGES_NOTE = (
    "The dive is the steepest line segment after a plateau, which is a segment at least "
    f"{loss_stages.SLOPE_RATIO} times flatter than the dive and than an earlier segment; in the "
    f"dive, the loss falls by at least {loss_stages.MIN_FALL:.0%} of its total fall."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    text = "output of fairseq-train (any --log-format but none); commas separate a model's seeds"
    parser.add_argument("logs", nargs="+", metavar="NAME=LOG[,LOG...]", help=text)
    text = "part of the training to draw, as in 0:16000 or 80000: (default: all of it)"
    parser.add_argument("--updates", type=_parse_span, default=":", metavar="FIRST:LAST", help=text)
    add_out(parser, "curves")


def run(args: argparse.Namespace) -> None:
    """Write the tables and pictures, and print the tables."""
    logs = parse_named(args.logs, "NAME=LOG")
    by_model = {x: [_read_log(x, Path(y)) for y in split_paths(logs[x], x)] for x in logs}
    with lock_folder(args.out):
        tables = collect_figures(by_model)
        text = format_tables(tables)
        Record("curves", tables, logs, command=own_command()).write(args.out / "curves.json")
        print(text)
        drawn = _draw_pictures(by_model, args.out, *args.updates)
        text += "".join(f"\n![{title}]({file})\n" for file, title in drawn.items())
        write_whole(args.out / "curves.md", text)
        say(f"wrote {args.out}; pictures: {len(drawn)}")


def collect_figures(by_model: CurvesByModel) -> dict[str, list[Row]]:
    """Collect the figures of all tables for the record."""
    tables: dict[str, list[Row]] = {"best": [], "stages": [], "seeds": []}
    for model, curves in by_model.items():
        rows = [_describe_curve(curve) for curve in curves]
        for number, row in enumerate(rows, start=1):
            row["training"] = f"{model} {number}" if len(curves) > 1 else model
            tables["best"].append({x: row[x] for x in ("training", *_COLUMNS, "diverged_at")})
            if "plateau" in row:
                tables["stages"].append({x: row[x] for x in ("training", *_STAGE_COLUMNS)})
        if len(curves) > 1:
            means: dict[str, object] = {"training": model, "seeds": len(curves)}
            for key in _SEED_COLUMNS:
                values: list[Any] = [row.get(key) for row in rows]
                if None not in values:  # a mean only if all seeds have the figure
                    means |= _MEANS.get(key, intervals.interval)(values).figures(key)
            tables["seeds"].append(means)
    return tables


def _describe_curve(curve: Curve) -> dict[str, object]:
    """Compute the figures of a curve by name; unknown ones are None or, of stages, absent."""
    best = curve.best  # not finite if all validations diverged
    figures: dict[str, object] = {
        "updates": curve.validations[-1].updates,
        "best_at": best.updates if best.is_finite else None,
        "loss_bits": best.loss if best.is_finite else None,
        "loss_nats": best.loss * NATS_PER_BIT if best.is_finite else None,
        "perplexity": best.perplexity if best.is_finite else None,
        "accuracy": best.accuracy,
        "tokens_per_second": curve.speed or None,  # 0 if the log does not say
        "loss_at_the_end_nats": loss_stages.last_loss(curve),
        "diverged_at": next((x.updates for x in curve.validations if not x.is_finite), None),
    }
    if ends := loss_stages.find_stages(curve):  # the updates at which the stages end
        figures |= {"start_ends": ends.start, "plateau_ends": ends.plateau, "dive_ends": ends.dive}
        figures["plateau"] = ends.plateau - ends.start
    return figures


def format_tables(tables: Mapping[str, Sequence[Row]]) -> str:
    """Format the figures as Markdown, and name the training runs that diverged."""
    parts = [_format_rows(tables["best"], _COLUMNS)]
    if tables["stages"]:
        parts += ["## Stages of the training loss", _format_rows(tables["stages"], _STAGE_COLUMNS)]
        parts.append(_STAGES_NOTE)
    if tables["seeds"]:
        parts += ["## Means over seeds", _format_rows(tables["seeds"], _SEED_COLUMNS)]
        parts.append(f"In brackets: {intervals.INTERVAL_NOTE}.")
    parts += [
        f"- {code(row['training'])} diverged: its validation loss is NaN or infinite, first at "
        f"update {row['diverged_at']:,}; such losses are left out"
        for row in tables["best"]
        if row["diverged_at"] is not None
    ]
    return "\n\n".join(parts) + "\n"


def _format_rows(rows: Sequence[Row], columns: Mapping[str, tuple[str, int]]) -> str:
    """Format the columns, name -> (title, decimals), in which any row has a figure."""
    used = {x: columns[x] for x in columns if any(row.get(x) is not None for row in rows)}
    cells = []
    for row in rows:
        cells.append([code(row["training"])])
        for name, (_, digits) in used.items():
            low, high = row.get(f"{name}_low", -math.inf), row.get(f"{name}_high", math.inf)
            cells[-1].append(intervals.Interval(row.get(name, math.nan), low, high).show(digits))
    return table(["run", *(title for title, _ in used.values())], cells)


def _draw_pictures(by_model: CurvesByModel, out: Path, first: float, last: float) -> dict[str, str]:
    """Draw validations and training losses between two updates; return the titles by file."""
    drawn = {}
    geometric, arithmetic = intervals.interval_of_perplexity, intervals.interval
    for file, title, list_points, mean, log in (  # `list_points` gives updates and values
        ("curves.png", "Validation perplexity", lambda curve: curve.points, geometric, True),
        ("training.png", "Training loss in nats", loss_stages.smooth_losses, arithmetic, False),
    ):
        lines = {}
        for name, curves in by_model.items():
            seeds = [[x for x in list_points(curve) if first <= x[0] <= last] for curve in curves]
            lines[name] = intervals.average_lines(seeds, mean)
        (out / file).unlink(missing_ok=True)  # of an earlier call
        if figure := pictures.draw_curves(lines, title, log=log):
            pictures.save(figure, out / file)
            drawn[file] = title
    return drawn


def _read_log(name: str, log: Path) -> Curve:
    """Read the log of a training run; refuse one without a validation."""
    if not log.is_file():
        raise UserError(f"{name}: there is no log file {log}")
    if (curve := read_curve_file(log)).validations:
        return curve
    advice = "fairseq-train prints one per epoch, not with --log-format none or to a --log-file"
    raise UserError(f"{name}: {log} has no validation; {advice}")


def _parse_span(text: str) -> tuple[float, float]:
    """Parse the first and the last update to draw."""
    if match := re.fullmatch(r"(\d*):(\d*)", text):
        first, last = float(match[1] or 0), float(match[2] or "inf")
        if first <= last:
            return first, last
    raise argparse.ArgumentTypeError(f"write FIRST:LAST, ascending, as in 0:16000, not '{text}'")
