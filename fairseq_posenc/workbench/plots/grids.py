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
MAX_PANELS = 48  # in a readable picture
SIGNED, UNSIGNED = "PuOr", "cividis"  # colour maps that colour-blind people can read
_TITLE_LETTERS = 85  # most letters in a line of a title


def new_page(count: int, title: str, columns: int, height: float) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of up to ``columns``, ``height`` inches each."""
    columns = min(columns, count)
    panel = WIDTH / columns, height
    figure, panels = pictures.new_panels(count, columns, panel, (0.0, 0.6), dpi=100)
    figure.suptitle(fill(title, _TITLE_LETTERS), fontsize=11, x=0.01, ha="left")
    for axes in panels:
        axes.tick_params(labelsize=8, length=0, colors=GREY)
    return figure, panels


def draw_heat_map(axes: Any, values: Tensor, **settings: Any) -> Any:
    """Draw a matrix with its first row at the top, and white for 0; return matplotlib's image.

    ``settings`` are those of ``imshow``. By default, the strongest colours stand for the largest
    absolute value, with either sign.
    """
    limit = float(values.detach().abs().max()) or 1.0  # colours need a range, also for zeros
    defaults = {"cmap": SIGNED, "vmin": -limit, "vmax": limit}
    shown = {**defaults, "aspect": "auto", "interpolation": "nearest", **settings}
    axes.spines[:].set_visible(False)
    return axes.imshow(values.detach().float().numpy(), **shown)


def draw_lines(axes: Any, x: Tensor, rows: Tensor, names: Sequence[str]) -> None:
    """Draw a line over ``x``, distances, for each row ``(lines, points)``; mark distance 0."""
    for number, (name, row) in enumerate(zip(names, rows.detach().float())):
        axes.plot(x.numpy(), row.numpy(), lw=1.4, label=name, **pictures.line_style(number))
    axes.axvline(0, color=PALE, lw=0.8, zorder=0)
    axes.grid(axis="y", color=pictures.GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Write the titles of a panel and of its axes."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8, color=GREY)
    axes.set_ylabel(y, fontsize=8, color=GREY)


def draw_legend(figure: Any, axes: Any) -> None:
    """Write the legend of a panel below the figure if the panel has several lines."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside lower center", ncols=8, fontsize=8)


def name_heads(heads: Sequence[int]) -> list[str]:
    """Name heads; indices count from 0, names from 1."""
    return [f"head {head + 1}" for head in heads]
