"""Draws means over seeds with their intervals, in colors that color-blind people can distinguish.

Functions import matplotlib, which takes time; ``Any`` is its Figure or Axes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.files import written_whole
from fairseq_posenc.workbench.results.intervals import Interval
from fairseq_posenc.workbench.results.markdown import format_number

# A line: x, and the mean there with its interval; NaN or infinite where a training run diverged.
Means = Sequence[tuple[int, Interval]]
# Okabe and Ito's colors, without yellow, which is pale on white.
COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = ("-", "--", ":", "-.")  # distinguish lines of the same color
GRAY, PALE, GRID = "#666666", "#bbbbbb", "#e4e4e4"


def new_panels(
    count: int, columns: int, size: tuple[float, float], dpi: int = 110
) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of ``columns``; return both. Its size is in inches."""
    from matplotlib import rc_context, rcParams, rcsetup
    from matplotlib.figure import Figure

    # Names and tokens may contain dollar signs. For the whole process: some texts are made later.
    rcParams["text.parse_math"] = False
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    lines = rcsetup.cycler(linestyle=STYLES) * rcsetup.cycler(color=COLORS)
    with rc_context({"axes.prop_cycle": lines}):  # for these panels alone
        panels = list(figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def save(figure: Any, path: Path) -> None:
    """Write a PNG or SVG file that is the same in every run: without dates and versions."""
    from matplotlib import rc_context

    varying = ("Date", "Creator") if path.suffix == ".svg" else ("Software",)
    with rc_context({"svg.hashsalt": path.stem}), written_whole(path) as new:
        figure.savefig(new, format=path.suffix[1:], metadata=dict.fromkeys(varying))


def draw_means(
    axes: Any,
    lines: Mapping[str, Means],
    label: Callable[[int, float], str],
    *,
    log: bool = False,
    **style: Any,
) -> None:
    """Draw lines by name with bands for their intervals; the legend has names and last points.

    ``label`` formats the last point; the legend says instead where a training run diverged.
    ``log`` makes the axis of values logarithmic. ``style``: matplotlib's settings for all lines.
    """
    if log:
        axes.set_yscale("log", subs=(1.5, 2, 3, 5, 7))  # minor ticks, times powers of 10
        axes.yaxis.set_minor_formatter("{x:,g}")
    drawn = []  # the legend's lines: by itself, it leaves out labels that begin with "_"
    for name, means in lines.items():
        if not means:
            axes.plot([], [])  # takes a color, so that each name has the same one in every picture
            continue
        xs, intervals = zip(*means)
        heights = [x.mean if math.isfinite(x.mean) else math.nan for x in intervals]
        gap = next((x for x, height in zip(xs, heights) if math.isnan(height)), None)
        end = f"diverged at {gap:,}" if math.isnan(heights[-1]) else label(xs[-1], heights[-1])
        drawn += axes.plot(xs, heights, label=f"{name}  {end}", **style)
        if any(x.is_bounded for x in intervals):  # infinite bounds leave a gap in the band
            _, low, high = zip(*intervals)
            axes.fill_between(xs, low, high, color=drawn[-1].get_color(), alpha=0.15, linewidth=0)
    axes.legend(handles=drawn, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", color=GRID)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(lines: Mapping[str, Means], title: str, *, log: bool) -> Any:
    """Draw lines over updates; return the figure, or None if no point is finite."""
    if not any(math.isfinite(y.mean) for means in lines.values() for _, y in means):
        return None
    figure, (axes,) = new_panels(1, columns=1, size=(9, 5.2), dpi=160)
    draw_means(axes, lines, lambda _, x: format_number(x, 1 if log else 2), log=log)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training updates")
    axes.set_title(title, loc="left", fontsize=14)
    return figure
