"""Pictures of the attention to a text: maps of layers and heads, and the mean by distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.distances import mean_by_distance

if TYPE_CHECKING:  # it brings fairseq, which pictures of specs do without
    from fairseq_posenc.analysis.split import CapturedAttention

_LABEL, _LETTER = 0.1, 0.06  # inches of a line of letters, and of one of them
_ALONE = 1.7  # a map alone in its row is this many times larger
_FEW = 4  # maps in a row that have room for whole titles


class Maps(NamedTuple):
    """Attention of some layers and heads to one sentence."""

    layers: Sequence[int]  # indices of the layers, from 0
    heads: Sequence[int]  # indices of the heads, from 0
    weights: Tensor  # `(layers, heads, tgt_len, src_len)`
    hidden: Tensor  # whether no head has any weight, `(layers, tgt_len, src_len)`
    queries: Sequence[str]  # the tokens that attend
    keys: Sequence[str]  # the tokens that are attended to

    @classmethod
    def of_stack(
        cls, seen: Sequence[CapturedAttention], queries: Sequence[str], keys: Sequence[str]
    ) -> Maps:
        """Build the maps of the first sentence; ``seen`` are all layers of a stack."""
        weights = torch.stack([attention.weights[0] for attention in seen])
        layers, heads = range(weights.size(0)), range(weights.size(1))
        return cls(layers, heads, weights, weights.eq(0).all(1), queries, keys)

    def select(self, layers: Sequence[int], heads: Sequence[int]) -> Maps:
        """Select layers and heads from those of a whole stack."""
        weights, hidden = self.weights[list(layers)], self.hidden[list(layers)]
        return self._replace(
            layers=layers, heads=heads, weights=weights[:, list(heads)], hidden=hidden
        )

    def subtract(self, others: Maps) -> Maps:
        """Subtract the attention of another model to the same tokens.

        Raises:
            UserError: the models read other tokens.
        """
        if (self.queries, self.keys) != (others.queries, others.keys):
            raise UserError(
                "the models split the text into different tokens: choose two with the same "
                "dictionary"
            )
        hidden = self.hidden & others.hidden
        return self._replace(weights=self.weights - others.weights, hidden=hidden)


def draw_attention(maps: Maps, title: str, signed: bool = False) -> Any:
    """Draw a Figure of attention maps, a row a layer and a column a head, on one scale.

    Tokens are written where there is room for them; hidden pairs are grey. ``signed`` is for
    differences of weights.
    """
    rows, columns, tgt_len, src_len = maps.weights.shape
    ratio = min(max(tgt_len / src_len, 0.5), 1.5)
    side = grids.panel_width(columns) * (_ALONE if columns == 1 else 1.0)
    below = max(map(len, maps.keys)) * _LETTER if _labels_fit(maps.keys, side) else 0.0
    figure, panels = grids.new_panels(
        rows * columns, title, columns, ratio * side / grids.panel_width(columns), below
    )
    limit = float(maps.weights.abs().max())
    form = "layer {}, head {}" if columns <= _FEW else "{}.{}"
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        image = grids.draw_heat_map(
            axes, maps.weights[row, column], limit, signed, maps.hidden[row]
        )
        axes.set_title(form.format(maps.layers[row] + 1, maps.heads[column] + 1), fontsize=9)
        left, bottom = column == 0, row == rows - 1
        _write_tokens(axes.set_yticks, maps.queries if left else (), side * ratio)
        _write_tokens(axes.set_xticks, maps.keys if bottom else (), side, rotation=90)
    grids.draw_scale(figure, image, panels, "difference of attention" if signed else "attention")
    return figure


def draw_distance(maps: Maps, title: str) -> Any:
    """Draw a Figure of the mean attention by distance, a panel a layer and a line a head.

    Hidden pairs do not count.
    """
    figure, panels = grids.new_panels(len(maps.layers), title, columns=2, ratio=0.7)
    for axes, layer, weights, hidden in zip(panels, maps.layers, maps.weights, maps.hidden):
        distances, means = mean_by_distance(weights[None], ~hidden[None])
        grids.draw_lines(axes, distances, means, grids.name_heads(maps.heads))
        grids.label_axes(axes, f"layer {layer + 1}", "distance j - i", "mean attention")
    grids.draw_legend(figure, panels[0])
    return figure


def _labels_fit(tokens: Sequence[str], room: float) -> bool:
    return len(tokens) * _LABEL <= room


def _write_tokens(set_ticks: Any, tokens: Sequence[str], room: float, **how: Any) -> None:
    """Write tokens along an axis, if so many inches are enough for them."""
    labels = tokens if _labels_fit(tokens, room) else ()
    set_ticks(range(len(labels)), list(labels), fontsize=7, **how)
