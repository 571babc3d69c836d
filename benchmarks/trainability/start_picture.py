"""The picture of M4M's starts: learning curves, labelled at their ends."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from starts import STARTS

from fairseq_posenc.workbench.results import pictures

COLOURS = ("#999999", *pictures.COLOURS, "#7F3FBF", "#8B4513")  # grey is without positions
Grid = dict[str, dict[str, list[dict[str, Any]]]]  # setting -> start, or "none" -> results


def draw_starts(grid: Grid, path: Path) -> None:
    """Draw the learning curves of every setting, labelled at their ends."""
    figure = pictures.new_figure(6.2 * len(grid), 4.4, dpi=80)
    for axes, (setting, labels) in zip(
        figure.subplots(1, len(grid), squeeze=False)[0], grid.items()
    ):
        curves = {label: _mean_curve(results) for label, results in labels.items()}
        axes.set_title(setting, loc="left", fontsize=11)
        axes.set_xlabel("updates", color=pictures.GREY)
        axes.tick_params(length=0, colors=pictures.GREY)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = (choose(y for _, ys in curves.values() for y in ys) for choose in (min, max))
        heights = pictures.spread(
            [(ys[-1] - low) / (high - low) for _, ys in curves.values()], 0.06
        )
        for (label, (xs, ys)), height in zip(curves.items(), heights):
            colour = dict(zip(("none", *STARTS), COLOURS))[label]
            axes.plot(xs, ys, color=colour, linewidth=1.8)
            text = f"{label}  {ys[-1]:.2f}"
            place = (1.02, (height * (high - low)) + low)
            axes.text(*place, text, color=colour, transform=axes.get_yaxis_transform(), va="center")
    figure.axes[0].set_ylabel("validation loss, bits per token", color=pictures.GREY)
    figure.savefig(path)


def _mean_curve(results: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    curves = [dict(map(tuple, result["curve"])) for result in results]
    shared = sorted(set.intersection(*map(set, curves)))
    return shared, [statistics.mean(curve[x] for curve in curves) for x in shared]
