"""Lays out figures of one width, a page's, and draws heat maps and lines in their panels.

``Any`` stands for classes of matplotlib, which is optional: a Figure, Axes or an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from torch import Tensor

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import GREY, PALE

WIDTH = 8.0  # of a picture, in inches
DPI = 100  # pixels per inch
MAX_PANELS = 48  # in a readable picture
# Colour maps that colour-blind people can read, also in print.
SIGNED, UNSIGNED = "PuOr", "cividis"
_FONT_SIZE = 8  # of labels, in points
_TITLE_LETTERS = 85  # most letters in a line of a title
_MARGIN = 0.6  # height of the title above the panels and the legend below them, in inches


def new_page(
    count: int, title: str, columns: int, height_to_width: float, labels_height: float = 0.0
) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of up to ``columns``; return both.

    ``height_to_width`` is the height of a panel divided by :func:`panel_width`, so the only panel
    of a row looks half as high. ``labels_height`` is the height of the labels below the last row,
    in inches.
    """
    columns = min(columns, count)
    height = height_to_width * panel_width(columns)
    panel = WIDTH / columns, height + min(0.5, 0.5 * height)  # with room for titles and labels
    margin = 0.0, _MARGIN + labels_height
    figure, panels = pictures.new_panels(count, columns, panel, margin, DPI)
    figure.suptitle(fill(title, _TITLE_LETTERS), fontsize=11, x=0.01, ha="left")
    return figure, panels


def panel_width(columns: int) -> float:
    """Estimate the width of a panel without its labels, in inches.

    One column counts as two: its panels are twice as wide, but not higher.
    """
    width = WIDTH / max(columns, 2)
    return width - min(0.7, 0.2 * width)  # the labels are on its left


def draw_heat_map(
    axes: Any,
    values: Tensor,
    limit: float | None = None,
    signed: bool = True,
    hidden: Tensor | None = None,
    extent: Sequence[float] | None = None,
) -> Any:
    """Draw a matrix as a heat map, with its first row at the top; return matplotlib's image.

    Args:
        axes: the panel.
        values: the matrix.
        limit: value of the strongest colour; by default the largest absolute value.
        signed: whether colours differ on both sides of 0.
        hidden: cells that are drawn grey.
        extent: matplotlib's coordinates of the edges: left, right, bottom and top.
    """
    import numpy as np
    from matplotlib import colormaps

    values = values.detach().float()
    masked = np.ma.masked_array(values.numpy(), mask=False if hidden is None else hidden.numpy())
    if limit is None:
        limit = float(values.abs().max())
    limit = limit or 1.0  # colours need a range, also for a matrix of zeros
    colours = colormaps[SIGNED if signed else UNSIGNED].with_extremes(bad=PALE)
    image = axes.imshow(
        masked,
        cmap=colours,
        vmin=-limit if signed else 0.0,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    axes.tick_params(labelsize=_FONT_SIZE, length=0, colors=GREY)
    axes.spines[:].set_visible(False)
    return image


def draw_lines(axes: Any, x: Tensor, rows: Tensor, names: Sequence[str]) -> None:
    """Draw a line over ``x``, distances, for each row ``(lines, points)``; mark distance 0."""
    for number, (name, row) in enumerate(zip(names, rows.detach().float())):
        axes.plot(x.numpy(), row.numpy(), lw=1.4, label=name, **pictures.line_style(number))
    axes.axvline(0, color=PALE, lw=0.8, zorder=0)
    pictures.style_frame(axes)
    axes.tick_params(labelsize=_FONT_SIZE)


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Write the titles of a panel and of its axes."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=_FONT_SIZE, color=GREY)
    axes.set_ylabel(y, fontsize=_FONT_SIZE, color=GREY)


def draw_colour_bar(figure: Any, image: Any, panels: Any, text: str = "") -> None:
    """Draw the colour bar beside panels."""
    bar = figure.colorbar(image, ax=panels, shrink=0.85, pad=0.02)
    bar.ax.tick_params(labelsize=_FONT_SIZE, length=0, colors=GREY)
    bar.outline.set_visible(False)
    bar.set_label(text, fontsize=_FONT_SIZE, color=GREY)


def draw_legend(figure: Any, axes: Any) -> None:
    """Write the legend of a panel below the figure if the panel has several lines."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(
            handles, names, loc="outside lower center", ncols=8, fontsize=_FONT_SIZE, frameon=False
        )


def name_heads(heads: Sequence[int]) -> list[str]:
    """Name heads; indices count from 0, names from 1."""
    return [f"head {head + 1}" for head in heads]
