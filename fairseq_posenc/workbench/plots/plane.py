"""Pictures of positions on two axes: the scores of a token in the middle of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.backends import reference
from fairseq_posenc.workbench.plots import grids

_SEED = 1


@torch.no_grad()
def compute_plane(positions: PositionEncoding, reach: int, samples: int = 64) -> Tensor:
    """Compute the mean score of the middle token of a grid with each token of the same content.

    Args:
        positions: with ``axes=2``, not causal.
        reach: rows and columns on each side of the middle.
        samples: number of random contents, of norm sqrt(embed_dim), to average over.

    Returns:
        ``(heads, 2 * reach + 1, 2 * reach + 1)``, by row and column.

    Raises:
        UserError: the spec has other axes.
    """
    dims, side = positions.assembly.dims, 2 * reach + 1
    ids = torch.cartesian_prod(torch.arange(side), torch.arange(side)).t()[:, None]  # [2, 1, T]
    generator = torch.Generator().manual_seed(_SEED)
    content = torch.randn(samples, 1, dims.embed_dim, generator=generator)
    x, shared = positions(content.expand(-1, side * side, -1), position_ids=ids)
    key = x.unflatten(-1, (dims.num_heads, -1)).transpose(1, 2)  # [samples, H, T, D]
    call = positions.make_call(key, key, key, shared, x, mask=shared.mask("both"))
    middle = reference.scores(call.query, call.key, call.terms, call.mask)[:, :, side * side // 2]
    return middle.mean(0).unflatten(-1, (side, side))


def draw_plane(scores: Tensor, heads: Sequence[int], title: str) -> Any:
    """Draw a Figure with a heat map of the scores ``(heads, rows, columns)`` of each head."""
    figure, panels = grids.new_panels(len(scores), title, columns=4, ratio=1.0)
    limit, reach = float(scores.abs().max()), scores.size(1) // 2
    extent = (-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5)
    for axes, values, name in zip(panels, scores, grids.name_heads(heads)):
        image = grids.draw_heat_map(axes, values, limit, extent=extent)
        axes.set_aspect("equal")
        grids.label_axes(axes, name, "columns away", "rows away")
    grids.draw_scale(figure, image, panels, "score")
    return figure
