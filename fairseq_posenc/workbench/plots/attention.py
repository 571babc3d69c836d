"""Draws the attention to a text: a map for each layer and head, and the mean by distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.distances import mean_by_distance

if TYPE_CHECKING:
    from fairseq_posenc.analysis.split import CapturedAttention

_LINE_INCHES = 0.1  # height of a line of text
_LETTER_INCHES = 0.06  # width of a letter
_SINGLE_MAP = 1.7  # width of the only map in a row, as a multiple of `grids.panel_width`
_LONG_TITLES = 4  # most maps in a row with room for titles such as `layer 1, head 2`


class Maps(NamedTuple):
    """The attention of some layers and heads to one sentence."""

    layers: Sequence[int]  # indices of the layers, from 0
    heads: Sequence[int]  # indices of the heads, from 0
    weights: Tensor  # attention weights, `(layers, heads, tgt_len, src_len)`
    hidden: Tensor  # whether no head attends to a pair, `(layers, tgt_len, src_len)`
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
        hidden = self.hidden[list(layers)]
        return self._replace(layers=layers, heads=heads, weights=weights, hidden=hidden)

    def subtract(self, others: Maps) -> Maps:
        """Subtract the attention of another model to the same tokens.

        Raises:
            UserError: the models read different tokens.
        """
        if (self.queries, self.keys) != (others.queries, others.keys):
            raise UserError(
                "the models split the text into different tokens: choose two with the same "
                "dictionary"
            )
        hidden = self.hidden & others.hidden
        return self._replace(weights=self.weights - others.weights, hidden=hidden)


def draw_attention(maps: Maps, title: str, signed: bool = False) -> Any:
    """Draw attention maps on one scale, a row for each layer and a column for each head.

    Tokens are written if they fit; hidden pairs are grey. Weights are ``signed`` if they are
    differences. Returns matplotlib's Figure.
    """
    rows, columns, tgt_len, src_len = maps.weights.shape
    panel_width = grids.panel_width(columns)
    map_width = panel_width * (_SINGLE_MAP if columns == 1 else 1.0)
    map_height = map_width * min(max(tgt_len / src_len, 0.5), 1.5)
    below = max(map(len, maps.keys)) * _LETTER_INCHES if _labels_fit(maps.keys, map_width) else 0.0
    figure, panels = grids.new_page(rows * columns, title, columns, map_height / panel_width, below)
    limit = float(maps.weights.abs().max())
    form = "layer {}, head {}" if columns <= _LONG_TITLES else "{}.{}"
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        weights, hidden = maps.weights[row, column], maps.hidden[row]
        image = grids.draw_heat_map(axes, weights, limit, signed, hidden)
        axes.set_title(form.format(maps.layers[row] + 1, maps.heads[column] + 1), fontsize=9)
        _write_tokens(axes.set_yticks, maps.queries if column == 0 else (), map_height)
        _write_tokens(axes.set_xticks, maps.keys if row == rows - 1 else (), map_width, rotation=90)
    text = "difference of attention" if signed else "attention"
    grids.draw_colour_bar(figure, image, panels, text)
    return figure


def draw_distance(maps: Maps, title: str) -> Any:
    """Draw the mean attention by distance, a panel for each layer and a line for each head.

    Hidden pairs do not count. Returns matplotlib's Figure.
    """
    figure, panels = grids.new_page(len(maps.layers), title, columns=2, height_to_width=0.7)
    for axes, layer, weights, hidden in zip(panels, maps.layers, maps.weights, maps.hidden):
        distances, means = mean_by_distance(weights[None], ~hidden[None])
        grids.draw_lines(axes, distances, means, grids.name_heads(maps.heads))
        grids.label_axes(axes, f"layer {layer + 1}", "distance j - i", "mean attention")
    grids.draw_legend(figure, panels[0])
    return figure


def _labels_fit(tokens: Sequence[str], inches: float) -> bool:
    return len(tokens) * _LINE_INCHES <= inches


def _write_tokens(set_ticks: Any, tokens: Sequence[str], inches: float, **style: Any) -> None:
    """Write tokens along an axis if they fit."""
    labels = tokens if _labels_fit(tokens, inches) else ()
    set_ticks(range(len(labels)), list(labels), fontsize=7, **style)
