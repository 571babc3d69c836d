"""The picture of M4M's starts: learning curves, labelled at their ends."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path
from typing import Any

from starts import STARTS

from fairseq_posenc.reporting.pictures import spread

GREY = "#666666"
# Okabe and Ito's, which colour-blind people can tell apart, after grey; then two more.
COLOURS = [
    *("#999999", "#000000", "#E69F00", "#0072B2", "#D55E00"),
    *("#009E73", "#CC79A7", "#56B4E9", "#7F3FBF", "#8B4513"),
]
Grid = dict[str, dict[str, list[dict[str, Any]]]]  # setting -> start, or "none" -> results


def draw_starts(grid: Grid, path: Path) -> None:
    """Draw the learning curves of every setting, labelled at their ends."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(6.2 * len(grid), 4.4), dpi=80, layout="constrained")
    for axes, (setting, labels) in zip(
        figure.subplots(1, len(grid), squeeze=False)[0], grid.items()
    ):
        curves = {label: _mean_curve(results) for label, results in labels.items()}
        axes.set_title(setting, loc="left", fontsize=11)
        axes.set_xlabel("updates", color=GREY)
        axes.tick_params(length=0, colors=GREY)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = (choose(y for _, ys in curves.values() for y in ys) for choose in (min, max))
        heights = spread([(ys[-1] - low) / (high - low) for _, ys in curves.values()], 0.06)
        for (label, (xs, ys)), height in zip(curves.items(), heights):
            colour = dict(zip(("none", *STARTS), COLOURS))[label]
            axes.plot(xs, ys, color=colour, linewidth=1.8)
            text = f"{label}  {ys[-1]:.2f}"
            place = (1.02, (height * (high - low)) + low)
            axes.text(*place, text, color=colour, transform=axes.get_yaxis_transform(), va="center")
    figure.axes[0].set_ylabel("validation loss, bits per token", color=GREY)
    figure.savefig(path)


def _mean_curve(results: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    curves = [dict(map(tuple, result["curve"])) for result in results]
    shared = sorted(set.intersection(*map(set, curves)))
    return shared, [statistics.mean(curve[x] for curve in curves) for x in shared]
