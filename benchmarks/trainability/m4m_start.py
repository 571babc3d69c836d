"""The subject ``m4m-start``: trains M4M from each of its starts, and reports the results."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from reports import describe_origin, last_loss, write_figures, write_report
from starts import STARTS
from training import Store, TrainingRun

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import average_lines, interval
from fairseq_posenc.workbench.results.markdown import table

COLOURS = ("#999999", *pictures.COLOURS, "#7F3FBF", "#8B4513")  # grey is without positions
Grid = dict[str, dict[str, list[dict[str, Any]]]]  # setting -> start, or "none" -> results
# Settings in which the starts of M4M are compared: name -> family, encoding, further options.
SETTINGS: dict[str, tuple[str, str, str]] = {
    "base": ("masked LM", "m4m", ""),
    "eps-1e-6": ("masked LM", "m4m", "--adam-eps 1e-6"),  # RoBERTa's
    "lr-0.0005": ("masked LM", "m4m", "--lr 0.0005"),
    "width-256": ("masked LM", "m4m", "--encoder-embed-dim 256 --encoder-ffn-embed-dim 1024"),
    "learned+m4m": ("masked LM", "learned+m4m", ""),
    "translation": ("translation", "m4m", ""),
}


def start_runs(args: argparse.Namespace) -> list[tuple[str, TrainingRun]]:
    """List the runs that compare M4M's starts, each with the name of its setting.

    All starts are trained in the first setting with the first seed. The starts of ``--starts`` are
    also trained with the other seeds, and in the other settings with the first seed.
    """
    first_setting, *other_settings = args.settings
    first_seed, *other_seeds = args.seeds
    cases = [(first_setting, first_seed, list(STARTS))]
    cases += [(first_setting, seed, args.starts) for seed in other_seeds]
    cases += [(setting, first_seed, args.starts) for setting in other_settings]
    runs = []
    for setting, seed, starts in cases:
        family, encoding, options = SETTINGS[setting]
        extra = tuple(options.split())
        none = TrainingRun(family, "none", seed, args.updates, extra=extra)
        runs.append((setting, none))
        for start in starts:
            runs.append((setting, none._replace(encoding=encoding, start=start)))
    return runs


def report_starts(args: argparse.Namespace, store: Store) -> None:
    """Train M4M from each start and write ``m4m_start.md``, ``.json`` and ``.png``."""
    grid: Grid = {}
    for setting, run in start_runs(args):
        label = run.encoding if run.encoding == "none" else run.start
        grid.setdefault(setting, {}).setdefault(label, []).append(store.get(run))
    picture = args.results / "m4m_start.png"
    draw_starts(grid, picture)
    results = [result for labels in grid.values() for seeds in labels.values() for result in seeds]
    write_figures(args.results / "m4m_start.json", {}, results)
    write_report(args.results / "m4m_start.md", _format_report(args, grid, picture.name))


def _format_report(args: argparse.Namespace, grid: Grid, picture: str) -> list[str]:
    return [
        "# How should M4M's table start?",
        "M4M multiplies three dot products, `(q_i.k_j) * (q_i.a_r) * (k_j.a_r)`, and its paper "
        "does not say how the vectors `a_r` start. The models are those of "
        "[trainability.md](trainability.md); all weights but the tables are equal for equal seeds.",
        *describe_origin(),
        *_format_losses(args, grid),
        f"![learning curves]({picture})",
    ]


def _format_losses(args: argparse.Namespace, grid: Grid) -> list[str]:
    seeds = ", ".join(map(str, args.seeds))
    first = next(iter(grid.values()))
    settings = (f"`{name}`: {' '.join(SETTINGS[name]).rstrip()}" for name in grid)
    meanings = {name: meaning for name, (meaning, _) in STARTS.items()}
    header = ["start", "vectors", *grid, "below `none` after", "gradient of W_Q", "of tables"]
    rows = []
    for label, explanation in zip(first, _explain_starts(first)):
        ends = [_format_ends(labels.get(label)) for labels in grid.values()]
        rows.append([f"`{label}`", meanings.get(label, "-"), *ends, *explanation])
    return [
        f"Settings: {'; '.join(settings)}. Validation loss at the end, in bits per token (first "
        f"setting: mean over seeds {seeds} ± half the range; one seed if no ±). In the first "
        "setting also the updates until the loss is below where `none` ends, and the size (root "
        "mean square) of the first update's gradients.",
        table(header, rows, "llr"),
    ]


def _format_ends(results: Optional[list[dict[str, Any]]]) -> str:
    if not results:
        return "-"
    ends = [last_loss(result) for result in results]
    spread = f" ± {(max(ends) - min(ends)) / 2:.2f}" if len(ends) > 1 else ""
    return f"{statistics.mean(ends):.3f}{spread}"


def _explain_starts(labels: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield when each start passes ``none``, and the sizes of its first gradients."""
    level = last_loss(labels["none"][0])
    for first, *_ in labels.values():
        below = next((str(updates) for updates, loss in first["curve"] if loss < level), None)
        cells = [below or "not reached"]
        for name in ("query projections", "position parameters"):
            size = first["gradients"].get(name)
            cells.append("-" if size is None else f"{size:.0e}")
        yield cells


def draw_starts(grid: Grid, path: Path) -> None:
    """Draw the learning curves of every setting, labelled at their ends."""
    styles = {name: {"color": colour} for name, colour in zip(("none", *STARTS), COLOURS)}
    figure, panels = pictures.new_panels(len(grid), len(grid), (6.2, 4.4), dpi=80)
    for axes, (setting, labels) in zip(panels, grid.items()):
        lines = {label: _average_curves(results) for label, results in labels.items()}
        values = [y.mean for line in lines.values() for _, y in line.mean]
        axes.set_title(setting, loc="left", fontsize=11)
        axes.set_xlabel("updates", color=pictures.GREY)
        pictures.style_values(axes, min(values), max(values), log=False)
        pictures.draw_lines(axes, lines, lambda x, y: f"{y:.2f}", styles)
    figure.axes[0].set_ylabel("validation loss, bits per token", color=pictures.GREY)
    pictures.save(figure, path)


def _average_curves(results: list[dict[str, Any]]) -> pictures.Line:
    curves = [[tuple(point) for point in result["curve"]] for result in results]
    return pictures.Line(average_lines(curves, interval))
