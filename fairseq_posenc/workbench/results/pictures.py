"""Defines the style of all pictures: colours and styles of lines, axes, labels and files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.files import written_whole

# Okabe and Ito's colours, which colour-blind people can distinguish, without the pale ones.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)))  # distinguish lines of the same colour
# The index of an encoding is the number of its style in every picture. The encodings that are
# compared most often come first, with different colours; new ones are added at the end.
_ENCODINGS = (
    *("none", "learned", "rope", "alibi", "m4m", "sinusoidal", "t5"),
    *("decbert_diff", "decbert_same", "kerple", "sandwich", "shaw", "fire", "xpos"),
    *("m1", "m2", "m3", "m4", "tupe", "tupe_shared", "raffel"),
    *("deberta", "deberta_v2", "transformer_xl", "shaw_values", "sentence_learned"),
    *("fox", "pope", "cope"),
)
GREY, PALE, GRID = "#666666", "#bbbbbb", "#e4e4e4"
_TICKS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
_FEW_TICKS = 3


def can_draw() -> bool:
    """Check whether matplotlib, which is optional, is installed."""
    # fairseq makes all libraries log; matplotlib would list all fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float, dpi: int) -> Any:
    """Create an empty figure of a size in inches; needs matplotlib."""
    can_draw()
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # names and tokens may contain dollar signs
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


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
            numbers[name] = next(free, count)
    return {name: line_style(number) for name, number in numbers.items()}


def style_values(axes: Any, low: float, high: float, log: bool) -> None:
    """Set the limits and ticks of the axis of values, with a light grid and no frame."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    if log:
        axes.set_yscale("log")
        axes.set_yticks(choose_ticks(low, high))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    style_lines(axes)


def style_lines(axes: Any) -> None:
    """Give axes a light grid, and no frame except the line at the bottom."""
    axes.tick_params(length=0, colors=GREY)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def axes_height(axes: Any, x: float, y: float) -> float:
    """Compute the height of a point as a share of the height of the axes; their limits are set."""
    share: float = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]
    return share


class LineEnd(NamedTuple):
    """The label beside the last point of a line."""

    text: str
    height: float  # height of the point as a share of the axes' height (:func:`axes_height`)
    colour: str


def label_ends(axes: Any, ends: Sequence[LineEnd], room: float) -> None:
    """Write labels beside the ends of lines, without overlaps.

    Args:
        axes: the axes, whose limits are set.
        ends: the labels.
        room: height of a label as a share of the axes' height.
    """
    for end, height in zip(ends, spread_out([end.height for end in ends], room)):
        axes.annotate(
            end.text,
            (1.015, height),
            xycoords="axes fraction",
            color=end.colour,
            fontsize=11,
            fontweight="bold",
            verticalalignment="center",
        )


def choose_ticks(low: float, high: float) -> list[float]:
    """Choose round numbers between two positive limits, about evenly spaced on a log scale."""
    powers = [10.0**exponent for exponent in range(-3, 300) if 10.0**exponent <= high]
    ticks = [digit * power for power in powers for digit in _TICKS if low <= digit * power <= high]
    if len(ticks) < _FEW_TICKS:  # in such a narrow range a log scale is nearly linear
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(5).tick_values(low, high)
        return [float(tick) for tick in values if low <= tick <= high]
    return ticks[:: -(-len(ticks) // 10)]  # ten are enough


def spread_out(heights: list[float], distance: float) -> list[float]:
    """Move heights apart, in their order, until none is closer than ``distance`` to the next.

    Heights that are too close form a group, which is spread evenly around its mean.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []

    def spread(group: list[int]) -> list[float]:
        centre = sum(heights[index] for index in group) / len(group)
        return [centre + (rank - (len(group) - 1) / 2) * distance for rank in range(len(group))]

    for index in order:
        groups.append([index])
        while len(groups) > 1 and spread(groups[-1])[0] - spread(groups[-2])[-1] < distance:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved: dict[int, float] = {}
    for group in groups:
        moved.update(zip(group, spread(group)))
    return [moved[index] for index in range(len(heights))]
