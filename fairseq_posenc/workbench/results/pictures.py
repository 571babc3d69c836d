"""Draws lines with intervals over seeds, in colours that colour-blind people can distinguish.

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

# Okabe and Ito's colours, without the pale ones.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = ("-", "--", ":", "-.")  # distinguish lines of the same colour
GREY, PALE, GRID = "#666666", "#bbbbbb", "#e4e4e4"


def can_draw() -> bool:
    """Check whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float, dpi: int = 110) -> Any:
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
    figure = new_figure(columns * panel[0] + margin[0], rows * panel[1] + margin[1], dpi)
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


def line_style(number: int) -> dict[str, str]:
    """Choose the colour and style of a line by its number."""
    style = STYLES[number // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style}


def style_values(axes: Any, low: float, high: float, *, log: bool) -> None:
    """Set the limits of the axis of values, with plain numbers, a light grid and no frame."""
    if log:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(length=0, colors=GREY)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)


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
        values = [y for _, mean in self.mean for y in (mean.mean, mean.low, mean.high)] + [
            y for _, y in self.dots
        ]
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
    **style_options: Any,
) -> None:
    """Draw lines by name into axes; the legend has each name and its last point.

    ``label`` formats the last point; a training that diverged has the place where it did.
    ``style_options`` are matplotlib's settings of all lines.
    """
    for number, (name, line) in enumerate(lines.items()):
        if not line.mean:
            continue
        x, last = line.mean[-1]
        end = label(x, last.mean)
        if not math.isfinite(last.mean):
            end = f"diverged at {next(x for x, y in line.mean if not math.isfinite(y.mean)):,}"
        line.draw(axes, line_style(number), label=f"{name}  {end}", **style_options)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
