"""Draws the attention to a text: a map for each layer and head, and the mean by distance.

``Any`` stands for matplotlib's Figure, which is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.distances import mean_by_distance
from fairseq_posenc.workbench.results.pictures import PALE

if TYPE_CHECKING:
    from fairseq_posenc.analysis.split import CapturedAttention

_LINE_INCHES = 0.1  # height of a line of text
_LETTER_INCHES = 0.06  # width of a letter


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

    width = 0.8 * grids.WIDTH / max(len(heads), 2)
    height = width * min(max(len(queries) / len(keys), 0.5), 1.5)
    row_labels, column_labels = (
        list(tokens) if len(tokens) * _LINE_INCHES <= inches else []
        for tokens, inches in ((queries, height), (keys, width))
    )
    # Room for the labels below the last row.
    below = max(map(len, column_labels), default=0) * _LETTER_INCHES / len(layers)
    count = len(layers) * len(heads)
    figure, panels = grids.new_page(count, title, len(heads), height + 0.5 + below)
    colours = colormaps[grids.UNSIGNED].with_extremes(bad=PALE)
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


def draw_distance(layers: Sequence[CapturedAttention], heads: Sequence[int], title: str) -> Any:
    """Draw the mean attention by distance, a panel for each layer and a line for each head.

    Pairs to which no head of the layer attends do not count. Returns matplotlib's Figure.
    """
    figure, panels = grids.new_page(len(layers), title, columns=2, height=2.8)
    for axes, layer in zip(panels, layers):
        seen = layer.weights.ne(0).any(1)
        distances, means = mean_by_distance(layer.weights[:, list(heads)], seen)
        grids.draw_lines(axes, distances, means, heads)
        grids.label_axes(axes, f"layer {layer.layer + 1}", "distance j - i", "mean attention")
    grids.draw_legend(figure, panels[0])
    return figure
