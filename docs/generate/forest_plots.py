"""Draws forest plots: the figures of all encodings with intervals and seeds, the best on top."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from docs.generate.measured import Column
from fairseq_posenc.workbench.experiments.choose.answer import BEST, SAME, UNKNOWN
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.differences import PERPLEXITY
from fairseq_posenc.workbench.results.pictures import COLOURS, GREY, GRID

_WIDTH, _WIDTH_OF_MANY = 3.6, 2.4  # width of a panel in inches, and of one of five or more
_LETTERS = 13  # letters of a title per inch
_COLOURS = {BEST: COLOURS[4], SAME: COLOURS[0], UNKNOWN: COLOURS[0]}  # grey for other verdicts


def draw(columns: Sequence[Column], path: Path) -> None:
    """Draw a panel for each column into a PNG file, with the encodings in the order of the first.

    The best encoding is green; those that do not differ significantly from it are black.
    """
    names = [
        name
        for name in dict.fromkeys(name for column in columns for name in column.ranked())
        if any(
            math.isfinite(column.figures[name].mean) for column in columns if name in column.figures
        )
    ]
    width = _WIDTH if len(columns) < 5 else _WIDTH_OF_MANY
    size = 2.2 + width * len(columns), 1.1 + 0.24 * len(names)
    figure = pictures.new_figure(*size, dpi=110)
    (panels,) = figure.subplots(1, len(columns), squeeze=False, sharey=True)
    for axes, column in zip(panels, columns):
        verdicts = column.verdicts()
        for row, name in enumerate(names):
            bounds = column.figures.get(name)
            if bounds is None or not math.isfinite(bounds.mean):
                continue
            colour = _COLOURS.get(verdicts[name], GREY)
            if math.isfinite(bounds.high - bounds.low):
                axes.plot([bounds.low, bounds.high], [row, row], color=colour, linewidth=1.6)
            axes.plot(bounds.mean, row, "o", color=colour, markersize=5)
            seeds = [*column.by_seed.get(name, {}).values()]
            axes.plot(seeds, [row] * len(seeds), "|", color=colour, markersize=7)
        axes.set_title(fill(column.title, int(_LETTERS * width)), loc="left", fontsize=10)
        if column.scale == PERPLEXITY:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="both", color=GRID, linewidth=0.8)
        axes.tick_params(length=0, colors=GREY, labelsize=9)
        axes.spines[:].set_visible(False)
    pictures.save(figure, path)
