"""Lays out figures of one width, a page's, and draws attention maps in them.

``Any`` stands for classes of matplotlib, which is optional: a Figure or Axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import torch

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import GREY, PALE

WIDTH = 8.0  # of a picture, in inches
SIGNED, UNSIGNED = "PuOr", "cividis"  # colour maps that colour-blind people can read
MAX_PANELS = 48  # in a readable picture
_LINE_INCHES = 0.1  # height of a line of text
_LETTER_INCHES = 0.06  # width of a letter


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


def label_axes(axes: Any, title: str, x: str, y: str = "") -> None:
    """Write the titles of a panel and of its axes."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8, color=GREY)
    axes.set_ylabel(y, fontsize=8, color=GREY)


def draw_attention(
    layers: Sequence[CapturedAttention],
    heads: Sequence[int],
    queries: Sequence[str],
    keys: Sequence[str],
    title: str,
) -> Any:
    """Draw attention maps on one scale, a row for each layer and a column for each head.

    Tokens are written if they fit; pairs to which no head of the layer attends are grey.

    Args:
        layers: attention to one sentence, ``(1, H, T, S)`` each.
        heads: indices of the heads to show.
        queries: text of the T tokens that attend.
        keys: text of the S tokens attended to.
        title: of the figure.

    Returns:
        matplotlib's Figure.
    """
    from matplotlib import colormaps

    width = 0.8 * WIDTH / max(len(heads), 2)
    height = width * min(max(len(queries) / len(keys), 0.5), 1.5)
    row_labels, column_labels = (
        list(tokens) if len(tokens) * _LINE_INCHES <= inches else []
        for tokens, inches in ((queries, height), (keys, width))
    )
    # Room for the labels below the last row.
    below = max(map(len, column_labels), default=0) * _LETTER_INCHES / len(layers)
    count = len(layers) * len(heads)
    figure, panels = new_page(count, title, len(heads), height + 0.5 + below)
    colours = colormaps[UNSIGNED].with_extremes(bad=PALE)
    limit = max(float(layer.weights[0, list(heads)].max()) for layer in layers) or 1.0
    for number, axes in enumerate(panels):
        row, column = divmod(number, len(heads))
        weights = layers[row].weights[0]  # [H, T, S]
        shown = weights[heads[column]].masked_fill(weights.eq(0).all(0), torch.nan)
        image = axes.imshow(shown.numpy(), cmap=colours, vmin=0.0, vmax=limit, aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_title(f"{layers[row].layer + 1}.{heads[column] + 1}", fontsize=9)
        axes.set(xticks=[], yticks=[])
        if column == 0:
            axes.set_yticks(range(len(row_labels)), row_labels, fontsize=7)
        if row == len(layers) - 1:
            axes.set_xticks(range(len(column_labels)), column_labels, fontsize=7, rotation=90)
    figure.colorbar(image, ax=panels, shrink=0.85, label="attention (titles: layer.head)")
    return figure
