"""Dot products of input vectors against their distance, themselves and through projections.

Sinusoids' dot products depend on the distance alone and fall with it. Once projected to queries and
keys, as attention does, they do not (Yan et al. 2019, "TENER", arXiv:1911.04474, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.stacks import Stack

_SEED = 1


def products(
    vectors: Tensor, reach: int, projections: Optional[tuple[Tensor, Tensor]] = None
) -> Tensor:
    """Return W_q p_t . W_k p_(t+k) for each head, ``(H, 2 * reach + 1)``, k from -reach to reach.

    Args:
        vectors: p, ``(n, C)``; t is its middle.
        reach: less than half of n.
        projections: W_q and W_k, ``(H, D, C)``; None for p_t . p_(t+k) itself, as of one head.
    """
    middle = vectors.size(0) // 2
    around = vectors[middle - reach : middle + reach + 1]
    if projections is None:
        return (around @ vectors[middle])[None]
    query, key = projections
    return torch.einsum("hd,hrd->hr", query @ vectors[middle], around @ key.transpose(1, 2))


def random_projections(like: Stack) -> tuple[Tensor, Tensor]:
    """Return W_q and W_k ``(H, D, C)``, normal with standard deviation C^-0.5, from a seed."""
    dims = like.layers[0].assembly.dims
    generator = torch.Generator().manual_seed(_SEED)
    size = (2, dims.num_heads, dims.head_dim, dims.embed_dim)
    query, key = torch.randn(size, generator=generator) * dims.embed_dim**-0.5
    return query, key


@torch.no_grad()
def draw_products(
    stack: Stack, layers: Sequence[int], heads: Sequence[int], reach: int, title: str
) -> Any:
    """Return a Figure of the products: themselves, through random projections, through the model's.

    Args:
        stack: of a model, or of a spec, which has no projections of its own.
        layers: whose projections, counted from 0.
        heads: likewise.
        reach: the largest distance; no further than the table's half is drawn.
        title: of the figure.

    Raises:
        UserError: nothing is added at the input.
    """
    vectors = stack.vectors()
    if vectors is None:
        raise UserError(f"{stack.spec} adds no vectors at the input, whose products could be shown")
    reach = stack.furthest(reach)
    drawn = {
        "themselves": products(vectors, reach),
        "random projections": products(vectors, reach, random_projections(stack))[list(heads)],
    }
    for layer in layers if stack.projections else ():
        own = products(vectors, reach, stack.projections[layer])
        drawn[f"projections of layer {layer + 1}"] = own[list(heads)]
    figure, panels = grids.new(len(drawn), title, columns=3, ratio=0.9)
    for axes, (name, rows) in zip(panels, drawn.items()):
        names = grids.heads(heads) if rows is not drawn["themselves"] else ["all channels"]
        grids.lines(axes, grids.distances(-reach, reach), rows, names)
        grids.label(axes, name, "distance k", "")
    grids.name_lines(figure, panels[1])
    return figure
