"""Draws the attention to a text: a map for each layer and head, and the mean by distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.distances import mean_by_distance
from fairseq_posenc.workbench.results.pictures import PALE

if TYPE_CHECKING:
    from fairseq_posenc.analysis.split import CapturedAttention

_LINE_INCHES = 0.1  # height of a line of text
_LETTER_INCHES = 0.06  # width of a letter


class Maps(NamedTuple):
    """The attention of some layers and heads to one sentence."""

    layers: Sequence[int]  # indices of the layers, from 0
    heads: Sequence[int]  # indices of the heads, from 0
    weights: Tensor  # attention weights, `(layers, heads, tgt_len, src_len)`
    hidden: Tensor  # whether no head of the layer attends to a pair, `(layers, tgt_len, src_len)`
    queries: Sequence[str]  # tokens of the queries
    keys: Sequence[str]  # tokens of the keys

    @classmethod
    def from_stack(
        cls, layers: Sequence[CapturedAttention], queries: Sequence[str], keys: Sequence[str]
    ) -> Maps:
        """Build the maps of the first sentence, with all layers of a stack."""
        weights = torch.stack([attention.weights[0] for attention in layers])
        heads = range(weights.size(1))
        return cls(range(len(layers)), heads, weights, weights.eq(0).all(1), queries, keys)

    def select(self, layers: Sequence[int], heads: Sequence[int]) -> Maps:
        """Select some layers and heads of a whole stack."""
        weights = self.weights[list(layers)][:, list(heads)]
        return Maps(layers, heads, weights, self.hidden[list(layers)], self.queries, self.keys)


def draw_attention(maps: Maps, title: str) -> Any:
    """Draw attention maps on one scale, a row for each layer and a column for each head.

    Tokens are written if they fit; hidden pairs are grey. Returns matplotlib's Figure.
    """
    from matplotlib import colormaps

    rows, columns, tgt_len, src_len = maps.weights.shape
    width = 0.8 * grids.WIDTH / max(columns, 2)
    height = width * min(max(tgt_len / src_len, 0.5), 1.5)
    queries, keys = (
        tokens if len(tokens) * _LINE_INCHES <= inches else ()
        for tokens, inches in ((maps.queries, height), (maps.keys, width))
    )
    below = max(map(len, keys), default=0) * _LETTER_INCHES / rows  # for the labels of the last row
    figure, panels = grids.new_page(rows * columns, title, columns, height + 0.5 + below)
    colours = colormaps[grids.UNSIGNED].with_extremes(bad=PALE)
    limit = float(maps.weights.max()) or 1.0
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        weights = maps.weights[row, column].masked_fill(maps.hidden[row], torch.nan)
        image = grids.draw_heat_map(axes, weights, cmap=colours, vmin=0.0, vmax=limit)
        axes.set_title(f"{maps.layers[row] + 1}.{maps.heads[column] + 1}", fontsize=9)
        for set_ticks, labels, is_shown, style in (
            (axes.set_yticks, queries, column == 0, {}),
            (axes.set_xticks, keys, row == rows - 1, {"rotation": 90}),
        ):
            tokens = list(labels) if is_shown else []
            set_ticks(range(len(tokens)), tokens, fontsize=7, **style)
    figure.colorbar(image, ax=panels, shrink=0.85, label="attention (titles: layer.head)")
    return figure


def draw_distance(maps: Maps, title: str) -> Any:
    """Draw the mean attention by distance, a panel for each layer and a line for each head.

    Hidden pairs do not count. Returns matplotlib's Figure.
    """
    figure, panels = grids.new_page(len(maps.layers), title, columns=2, height=2.8)
    for axes, layer, weights, hidden in zip(panels, maps.layers, maps.weights, maps.hidden):
        distances, means = mean_by_distance(weights[None], ~hidden[None])
        grids.draw_lines(axes, distances, means, grids.name_heads(maps.heads))
        grids.label_axes(axes, f"layer {layer + 1}", "distance j - i", "mean attention")
    grids.draw_legend(figure, panels[0])
    return figure
