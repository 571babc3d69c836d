"""The picture: perplexity over context length, the trained length marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.experiments.length.report import Results, Row
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import GREY, PALE

_MARGIN = 1.05  # room above and below the lines
_LABEL_HEIGHT = 0.06  # of the height of the axes
Line = tuple[list[int], list[float]]  # lengths, perplexities


def draw(results: Results, path: Path) -> bool:
    """Draw all lines, labelled at their ends, a panel for each mode; say whether there are any."""
    lines = {mode: [_line(row, mode) for row in results.rows] for mode in results.modes}
    values = [value for mode in lines.values() for _, ys in mode for value in ys]
    if not values:
        return False
    figure = pictures.new_figure(6.2 * len(lines), 4.4, dpi=110)
    panels = figure.subplots(1, len(lines), squeeze=False)[0]
    for axes, mode in zip(panels, lines):
        axes.set_title(mode, loc="left", fontsize=12)
        _style_lengths(axes, results)
        pictures.style_values(axes, min(values) / _MARGIN, max(values) * _MARGIN, log=True)
        _draw_lines(axes, [row.variant.name for row in results.rows], lines[mode])
    panels[0].set_ylabel("perplexity per token", color=GREY)
    pictures.save(figure, path)
    return True


def _line(row: Row, mode: str) -> Line:
    points = [(s.length, s.perplexity) for s in row.scores[mode].values() if s.perplexity]
    return [x for x, _ in points], [y for _, y in points]


def _style_lengths(axes: Any, results: Results) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(results.lengths, [f"{length:,}" for length in results.lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length, tokens", color=GREY)
    for length in sorted({row.trained_length for row in results.rows}):
        axes.axvline(length, color=PALE, linestyle=":", linewidth=1.2, zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(length, 1.0, " trained", color=GREY, fontsize=9, transform=place, va="top")


def _draw_lines(axes: Any, names: list[str], lines: list[Line]) -> None:
    drawn = [index for index, (xs, _) in enumerate(lines) if xs]
    furthest = max((lines[index][0][-1] for index in drawn), default=0)
    ends, styles = [], pictures.looks(names)
    for index in drawn:
        (xs, ys), style = lines[index], styles[names[index]]
        axes.plot(xs, ys, marker="o", markersize=3.5, linewidth=1.8, **style)
        text = f"{names[index]}  {ys[-1]:,.1f}" + (f" at {xs[-1]:,}" if xs[-1] < furthest else "")
        ends.append((text, pictures.height(axes, xs[-1], ys[-1]), style["color"]))
    pictures.label_ends(axes, ends, _LABEL_HEIGHT)
