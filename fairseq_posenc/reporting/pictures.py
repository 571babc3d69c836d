"""The picture of learning curves, and the style that all pictures of lines share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
Line = Sequence[tuple[int, float]]
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
    draw_lines({name: curve.points for name, curve in curves.items()}, title, path, log=True)


def draw_lines(lines: Mapping[str, Line], title: str, path: Path, log: bool) -> None:
    """Draw lines over updates, labelled at their ends, into a PNG file.

    Args:
        lines: updates and values, by name; what has none is left out.
        title: above the picture.
        path: of the file.
        log: whether the values' scale is logarithmic.
    """
    from matplotlib.figure import Figure

    drawn = {name: line for name, line in lines.items() if line}
    if not drawn:
        return
    figure: Any = Figure(figsize=(9, 5.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    updates, values = zip(*(point for line in drawn.values() for point in line))
    low, high = min(values), max(values)
    room = (high - low or 1.0) * (_MARGIN - 1)
    low, high = (low / _MARGIN, high * _MARGIN) if log else (low - room, high + room)
    # Each line keeps its colour in all pictures of a command, whichever are left out of one.
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(lines)}
    for number, (name, line) in enumerate(drawn.items()):
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(*zip(*line), style, color=colours[name], linewidth=2.2)
    _style(axes, (min(updates), max(updates)), (low, high), log)
    _label_lines(axes, drawn, colours)
    axes.set_title(title, loc="left", fontsize=14, pad=14)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    figure.savefig(path)


def _label_lines(axes: Any, lines: Mapping[str, Line], colours: Mapping[str, str]) -> None:
    """Write each name where its line ends, in a column that no two names share."""
    ends = [line[-1] for line in lines.values()]
    shares = axes.transAxes.inverted().transform(axes.transData.transform(ends))[:, 1]
    for name, (_, end), height in zip(lines, ends, spread(list(shares), _LABEL_HEIGHT)):
        axes.annotate(
            f"{name}  {end:,.{1 if axes.get_yscale() == 'log' else 2}f}",
            (1.015, height),
            xycoords="axes fraction",
            color=colours[name],
            fontsize=_LABEL_SIZE,
            fontweight="bold",
            verticalalignment="center",
        )


def _style(axes: Any, updates: tuple[int, int], limits: tuple[float, float], log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xlabel("training updates", color=GREY, fontsize=_LABEL_SIZE)
    # A line that begins late is drawn from there, one that begins at the start from zero.
    first, last = updates
    axes.set_xlim(first if last / 8 < first < last else 0, last)
    axes.set_ylim(*limits)
    if log:
        axes.set_yscale("log")
        axes.set_yticks(plain_ticks(*limits))
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
