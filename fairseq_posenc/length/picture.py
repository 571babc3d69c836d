"""The picture: perplexity over context length, the trained length marked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fairseq_posenc.length.report import Results, Row
from fairseq_posenc.reporting.pictures import COLOURS, GREY, STYLES, plain_ticks, spread

_MARGIN = 1.05  # room above and below the lines
_LABEL_HEIGHT = 0.06  # of the height of the axes
_FEW_TICKS = 3
Line = tuple[list[int], list[float]]  # lengths, perplexities


def draw(results: Results, path: Path) -> bool:
    """Draw all lines, labelled at their ends, a panel for each mode; return whether there are any.

    Args:
        results: the figures.
        path: a PNG file.
    """
    from matplotlib.figure import Figure

    lines = {mode: [_line(row, mode) for row in results.rows] for mode in results.modes}
    values = [value for mode in lines.values() for _, ys in mode for value in ys]
    if not values:
        return False
    low, high = min(values) / _MARGIN, max(values) * _MARGIN
    figure: Any = Figure(figsize=(6.2 * len(lines), 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(lines), squeeze=False)[0]
    for axes, mode in zip(panels, lines):
        axes.set_title(mode, loc="left", fontsize=12)
        _style(axes, results, low, high)
        _draw_lines(axes, [row.candidate.name for row in results.rows], lines[mode], low, high)
    panels[0].set_ylabel("perplexity per token", color=GREY)
    figure.savefig(path, metadata={"Software": None})
    return True


def _line(row: Row, mode: str) -> Line:
    points = [(s.length, s.perplexity) for s in row.scores[mode].values() if s.perplexity]
    return [x for x, _ in points], [y for _, y in points]


def _style(axes: Any, results: Results, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(results.lengths, [f"{length:,}" for length in results.lengths])
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = plain_ticks(low, high)
    if len(ticks) < _FEW_TICKS:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length, tokens", color=GREY)
    axes.tick_params(length=0, colors=GREY)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    for length in sorted({row.trained_length for row in results.rows}):
        axes.axvline(length, color="#bbbbbb", linestyle=":", linewidth=1.2, zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(length, 1.0, " trained", color=GREY, fontsize=9, transform=place, va="top")


def _draw_lines(axes: Any, names: list[str], lines: list[Line], low: float, high: float) -> None:
    drawn = [index for index, (xs, _) in enumerate(lines) if xs]
    furthest = max(lines[index][0][-1] for index in drawn)
    ends = [math.log(lines[index][1][-1] / low) / math.log(high / low) for index in drawn]
    for index, height in zip(drawn, spread(ends, _LABEL_HEIGHT)):
        (xs, ys), colour = lines[index], COLOURS[index % len(COLOURS)]
        style = STYLES[index // len(COLOURS) % len(STYLES)]
        axes.plot(xs, ys, style, marker="o", markersize=3.5, color=colour, linewidth=1.8)
        text = f"{names[index]}  {ys[-1]:,.1f}" + (f" at {xs[-1]:,}" if xs[-1] < furthest else "")
        place = {"xycoords": "axes fraction", "va": "center"}
        axes.annotate(text, (1.02, height), color=colour, weight="bold", **place)
