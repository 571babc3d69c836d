"""Lays out figures of one width, a page's, and draws lines in their panels.

``Any`` stands for classes of matplotlib, which is optional: a Figure or Axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import GREY, PALE

WIDTH = 8.0  # of a picture, in inches
SIGNED, UNSIGNED = "PuOr", "cividis"  # colour maps that colour-blind people can read
MAX_PANELS = 48  # in a readable picture


def new_page(
    count: int, title: str, columns: int, height: float, most: int = MAX_PANELS
) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of up to ``columns``, ``height`` inches each.

    Raises:
        UserError: there are more than ``most`` panels.
    """
    if count > most:
        raise UserError(f"{count} panels are too many for a picture: choose --layer, --head")
    columns = min(columns, count)
    panel = WIDTH / columns, height
    figure, panels = pictures.new_panels(count, columns, panel, (0.0, 0.6), dpi=100)
    figure.suptitle(fill(title, 85), fontsize=11, x=0.01, ha="left")
    for axes in panels:
        axes.tick_params(labelsize=8, length=0, colors=GREY)
    return figure, panels


def draw_lines(
    axes: Any, x: Tensor, rows: Tensor, heads: Sequence[int], name: str = "all heads"
) -> None:
    """Draw a line over ``x``, distances, for each row ``(lines, points)``; mark distance 0.

    The lines are those of ``heads``, by their indices; another number of lines has the ``name``.
    """
    names = [f"head {head + 1}" for head in heads] if len(rows) == len(heads) else [name]
    for number, (line, row) in enumerate(zip(names, rows.detach().float())):
        axes.plot(x.numpy(), row.numpy(), lw=1.4, label=line, **pictures.line_style(number))
    axes.axvline(0, color=PALE, lw=0.8, zorder=0)
    axes.grid(axis="y", color=pictures.GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def label_axes(axes: Any, title: str, x: str, y: str = "") -> None:
    """Write the titles of a panel and of its axes."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8, color=GREY)
    axes.set_ylabel(y, fontsize=8, color=GREY)


def draw_legend(figure: Any, axes: Any) -> None:
    """Write the legend of a panel below the figure if the panel has several lines."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside lower center", ncols=8, fontsize=8)
