"""The picture of learning curves, and the style that all pictures of lines share."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_posenc.running.logs import Curve

# Okabe and Ito's colours, which colour-blind people can tell apart, without the pale ones.
COLOURS = ["#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"]
STYLES = ["-", "--", ":", "-."]  # for more models than colours
GREY = "#666666"
_TICKS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
_LABEL_SIZE = 11
_LABEL_HEIGHT = 0.055  # of the height of the axes, for one label at the end of a line
_MARGIN = 1.08  # room above and below the curves


def can_draw() -> bool:
    """Return whether matplotlib, which is optional, is installed."""
    # fairseq switches on everybody's messages; matplotlib's are long lists of fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_curves(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Draw validation perplexities over updates, labelled at their ends, into a PNG file.

    Args:
        curves: by name.
        title: above the picture.
        path: of the file.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 5.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    points = [point for curve in curves.values() for point in curve.points]
    updates, values = zip(*points)
    low, high = min(values) / _MARGIN, max(values) * _MARGIN
    colours = _draw_lines(axes, curves)
    _label_lines(axes, curves, colours, low, high)
    axes.set_title(title, loc="left", fontsize=14, pad=14)
    _style(axes, max(updates), low, high)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    figure.savefig(path)


def _draw_lines(axes: Any, curves: Mapping[str, Curve]) -> list[str]:
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(curves))]
    for number, curve in enumerate(curves.values()):
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        updates, perplexities = zip(*curve.points)
        axes.plot(updates, perplexities, style, color=colours[number], linewidth=2.2)
    return colours


def _label_lines(
    axes: Any, curves: Mapping[str, Curve], colours: list[str], low: float, high: float
) -> None:
    """Write each name where its line ends, in a column that no two names share."""
    ends = [curve.points[-1][1] for curve in curves.values()]
    heights = [math.log(end / low) / math.log(high / low) for end in ends]
    for name, colour, end, height in zip(curves, colours, ends, spread(heights, _LABEL_HEIGHT)):
        axes.annotate(
            f"{name}  {end:,.1f}",
            (1.015, height),
            xycoords="axes fraction",
            color=colour,
            fontsize=_LABEL_SIZE,
            fontweight="bold",
            verticalalignment="center",
        )


def _style(axes: Any, updates: int, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xlabel("training updates", color=GREY, fontsize=_LABEL_SIZE)
    axes.set_xlim(0, updates)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(plain_ticks(low, high))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(length=0, colors=GREY, labelsize=_LABEL_SIZE)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def plain_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive limits, about evenly spaced on a log scale."""
    powers = [10.0**exponent for exponent in range(-3, 300) if 10.0**exponent <= high]
    ticks = [digit * power for power in powers for digit in _TICKS if low <= digit * power <= high]
    step = -(-len(ticks) // 10)  # ten are enough
    return ticks[::step] if step else []


def spread(heights: list[float], distance: float) -> list[float]:
    """Move heights apart, as little as their order allows, until none is too near the next."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []

    def places(group: list[int]) -> list[float]:
        centre = sum(heights[index] for index in group) / len(group)
        return [centre + (place - (len(group) - 1) / 2) * distance for place in range(len(group))]

    for index in order:
        groups.append([index])
        while len(groups) > 1 and places(groups[-1])[0] - places(groups[-2])[-1] < distance:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = dict(
        zip((i for group in groups for i in group), (p for g in groups for p in places(g)))
    )
    return [moved[index] for index in range(len(heights))]
