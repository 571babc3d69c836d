"""Draws lines in the style of all pictures: colours, axes, labels and files.

matplotlib is optional: functions import it, and ``Any`` stands for its Figure and Axes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.files import written_whole
from fairseq_posenc.workbench.results.intervals import Interval, average_lines, interval

Points = Sequence[tuple[int, float]]  # x and y; y is NaN where there is a gap

# Okabe and Ito's colours, which colour-blind people can distinguish, without the pale ones.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)))  # distinguish lines of the same colour
# The index of an encoding is the number of its style in every picture. The encodings that are
# compared most often come first, with different colours; new ones are added at the end.
_ENCODINGS = (
    "none",
    "learned",
    "rope",
    "alibi",
    "m4m",
    "sinusoidal",
    "t5",
    "decbert_diff",
    "decbert_same",
    "kerple",
    "sandwich",
    "shaw",
    "fire",
    "xpos",
    "m1",
    "m2",
    "m3",
    "m4",
    "tupe",
    "tupe_shared",
    "raffel",
    "deberta",
    "deberta_v2",
    "transformer_xl",
    "shaw_values",
    "sentence_learned",
    "fox",
    "pope",
    "cope",
)
GREY, PALE, GRID = "#666666", "#bbbbbb", "#e4e4e4"
_TICKS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)  # times powers of ten, on a log scale
_MIN_TICKS = 3
_MAX_TICKS = 10
_LABEL_HEIGHT = 0.06  # height of a label at the end of a line, as a share of the axes' height


def can_draw() -> bool:
    """Check whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float, dpi: int) -> Any:
    """Create an empty figure of a size in inches."""
    # fairseq enables the messages of all libraries, and matplotlib would list all fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # names and tokens may contain dollar signs
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def new_panels(
    count: int,
    columns: int,
    panel: tuple[float, float],
    margin: tuple[float, float] = (0.0, 0.0),
    dpi: int = 110,
    **sharing: Any,
) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of up to ``columns``; return both.

    ``panel`` and ``margin``, the room outside all panels, are widths and heights in inches.
    ``sharing`` has matplotlib's ``sharex`` and ``sharey``.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = columns * panel[0] + margin[0], rows * panel[1] + margin[1]
    figure = new_figure(*size, dpi)
    panels = list(figure.subplots(rows, columns, squeeze=False, **sharing).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def save(figure: Any, path: Path) -> None:
    """Write a PNG or SVG file that is the same in every run: without dates and versions."""
    from matplotlib import rc_context

    varying = "Date" if path.suffix == ".svg" else "Software"
    with rc_context({"svg.hashsalt": path.stem}), written_whole(path) as new:
        figure.savefig(new, format=path.suffix[1:], metadata={varying: None})


def line_style(number: int, colours: Sequence[str] = COLOURS) -> dict[str, Any]:
    """Choose the colour and style of a line by its number."""
    return {
        "color": colours[number % len(colours)],
        "linestyle": STYLES[number // len(colours) % len(STYLES)],
    }


def assign_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Assign colours and styles to the names of models.

    An encoding has the same style in every picture; other names take the first free styles.
    """
    numbers = {name: _ENCODINGS.index(name) for name in names if name in _ENCODINGS}
    count = len(COLOURS) * len(STYLES)
    free = (number for number in range(count) if number not in numbers.values())
    for name in names:
        if name not in numbers:
            numbers[name] = next(free, count)  # `count` is the first style once more
    return {name: line_style(number) for name, number in numbers.items()}


def style_values(axes: Any, low: float, high: float, *, log: bool) -> None:
    """Set the limits and ticks of the axis of values, with a light grid and no frame."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    if log:
        axes.set_yscale("log")
        axes.set_yticks(choose_ticks(low, high))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    style_frame(axes)


def style_frame(axes: Any) -> None:
    """Give axes a light grid, and no frame except the line at the bottom."""
    axes.tick_params(length=0, colors=GREY)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


class Line(NamedTuple):
    """A line of a picture: a mean over seeds, with its intervals and the seeds.

    A mean that is NaN or infinite is a gap, such as where a training diverged.
    """

    mean: Sequence[tuple[int, Interval]]  # x, and the mean there
    dots: Points = ()  # points of single seeds

    @classmethod
    def over_seeds(
        cls, seeds: Sequence[Points], average: Callable[[Iterable[float]], Interval] = interval
    ) -> Line:
        """Average the points of all seeds, where each has one; several seeds are drawn as dots."""
        dots = [point for points in seeds for point in points] if len(seeds) > 1 else []
        return cls(average_lines(seeds, average), dots)

    @property
    def values(self) -> list[float]:
        """All finite values, with those of intervals and seeds, for which an axis needs room."""
        values = [y for _, mean in self.mean for y in mean] + [y for _, y in self.dots]
        return [y for y in values if math.isfinite(y)]

    def draw(self, axes: Any, style: Mapping[str, Any], **overrides: Any) -> None:
        """Draw the mean, a band for its intervals, and dots; a cross marks the first gap."""
        means = [(x, y.mean if math.isfinite(y.mean) else math.nan) for x, y in self.mean]
        axes.plot(*zip(*means), **{"lw": 2.0, **style, **overrides})
        colour = style["color"]
        if band := [(x, y.low, y.high) for x, y in self.mean if y.is_bounded]:
            axes.fill_between(*zip(*band), color=colour, alpha=0.15, linewidth=0)
        if dots := [point for point in self.dots if math.isfinite(point[1])]:
            axes.plot(*zip(*dots), "o", color=colour, ms=2.5, alpha=0.6, mew=0)
        gap = next((x for x, y in means if math.isnan(y)), None)
        if gap is not None:
            above = axes.get_xaxis_transform()
            axes.plot(gap, 1.0, "X", color=colour, ms=9, transform=above, clip_on=False)


def draw_lines(
    axes: Any,
    lines: Mapping[str, Line],
    label: Callable[[int, float], str] = lambda x, y: f"{y:,.1f}",
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    **style_options: Any,
) -> None:
    """Draw lines by name into axes with limits; labels beside their ends do not overlap.

    A label has the name and the last point, formatted by ``label``, or says where the training
    diverged. The style of a line is by default that of its encoding (:func:`assign_styles`);
    ``style_options`` are matplotlib's settings of all lines.
    """
    styles = styles or assign_styles(list(lines))
    heights: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, line in lines.items():
        if not line.mean:
            continue
        line.draw(axes, styles[name], **style_options)
        x = line.mean[-1][0]
        y = line.mean[-1][1].mean
        if math.isfinite(y):
            texts[name] = f"{name}  {label(x, y)}"
            point = axes.transData.transform((x, y))
            heights[name] = float(axes.transAxes.inverted().transform(point)[1])
        else:
            last_finite = max((x for x, y in line.mean if math.isfinite(y.mean)), default=-1)
            end = next(x for x, _ in line.mean if x > last_finite)  # all later means are NaN
            texts[name] = f"{name}  diverged at {end:,}"
            heights[name] = 1.0
    places = spread_out(list(heights.values()), _LABEL_HEIGHT) if heights else []
    for name, height in zip(heights, places):
        axes.annotate(
            texts[name],
            (1.015, height),
            xycoords="axes fraction",
            color=styles[name]["color"],
            fontsize=11,
            fontweight="bold",
            verticalalignment="center",
        )


def choose_ticks(low: float, high: float) -> list[float]:
    """Choose round numbers between two positive limits, about evenly spaced on a log scale."""
    powers = [10.0**exponent for exponent in range(-3, 300) if 10.0**exponent <= high]
    ticks = [digit * power for power in powers for digit in _TICKS if low <= digit * power <= high]
    if len(ticks) < _MIN_TICKS:  # in such a narrow range a log scale is nearly linear
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(5).tick_values(low, high)
        return [float(tick) for tick in values if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]


def spread_out(heights: Sequence[float], distance: float) -> list[float]:
    """Move heights apart, in their order, until none is closer than ``distance`` to the next.

    The sum of squared movements is the smallest possible: it is an isotonic regression of the
    heights without the distances.
    """
    import numpy as np
    from scipy.optimize import isotonic_regression

    order = np.argsort(heights, kind="stable")
    steps = distance * np.arange(len(heights))
    moved = np.empty(len(heights))
    moved[order] = isotonic_regression(np.asarray(heights)[order] - steps).x + steps
    return [float(height) for height in moved]
