"""The reset's two rows outside the kernels: their products with queries, keys and weights.

In stored tiles they are the row of the query at the first token, and the column of the key there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.problem import Problem, Wave


def products(x: Tensor, table: Tensor | None) -> Tensor | None:
    """Return products of ``(B, H, T, D)`` with a table's last two rows, ``(B, H, T, 2)``."""
    return None if table is None else Products.apply(x, table[:, -2:])


class Products(torch.autograd.Function):
    """``x @ rows^T`` in float32. A float32 copy of ``x`` is made, but not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        """Return ``(B, H, T, 2)`` of ``(B, H, T, D)`` and ``(G, 2, D)``."""
        ctx.save_for_backward(x, rows)
        return x.float() @ rows.float().transpose(-1, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        x, rows = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            by_head = (grad.transpose(-1, -2) @ x.float()).sum(0)  # [H, 2, D]
            by_rows = by_head.sum_to_size(rows.shape)
            return (grad @ rows.float()).type_as(x), by_rows.type_as(rows)


class Taken(NamedTuple):
    """The gradients of a term that a wave's tiles hold for the reset.

    Attributes:
        here: of a query at the first token and each key, ``(sequences, keys)`` of float32.
        there: of each other query and a key there, ``(sequences, T)`` of float32.
        query: which query the first token is, ``(sequences,)``; one that exists if none is.
        key: which key, counted from the wave's first one, ``(sequences,)``; as before.
    """

    here: Tensor
    there: Tensor
    query: Tensor
    key: Tensor


def take(problem: Problem, wave: Wave, tile: Tensor) -> Taken:
    """Return the reset's gradients, and put zeros in their places.

    Args:
        problem: one with a reset.
        wave: the wave.
        tile: gradients by query and key without the zeros around, ``(sequences, T, keys)``.
    """
    assert problem.first is not None
    each = torch.arange(wave.sequences, device=tile.device)
    first = problem.first[(wave.sequence + each) // problem.heads].long()
    query, key = first - (problem.src_len - problem.tgt_len), first - wave.layout.start
    no_query, no_key = query < 0, (key < 0) | (key >= tile.size(2))
    query, key = query.clamp(0), key.clamp(0, tile.size(2) - 1)
    row = tile[each, query]
    tile[each, query] = row.masked_fill(~no_query[:, None], 0.0)
    column = tile[each, :, key]
    tile[each, :, key] = column.masked_fill(~no_key[:, None], 0.0)
    return Taken(
        row.float().masked_fill(no_query[:, None], 0.0),
        column.float().masked_fill(no_key[:, None], 0.0),
        query,
        key,
    )


def add_to_pairs(grad: Tensor, taken: Taken, wave: Wave, of_query: bool) -> None:
    """Add to the gradients of products with the reset's rows, ``(B, H, T or S, 2)``."""
    each = torch.arange(wave.sequences, device=grad.device)
    grad = grad.flatten(0, 1)[wave.sequence : wave.sequence + wave.sequences]
    if of_query:
        grad[each, taken.query, 0] += taken.here.sum(1)
        grad[..., 1] += taken.there
    else:
        grad = grad[:, wave.layout.start : wave.layout.end]
        grad[..., 0] += taken.here
        grad[each, taken.key, 1] += taken.there.sum(1)


def add_to_scalars(grad: Tensor, taken: Taken, problem: Problem, wave: Wave) -> None:
    """Add to the gradients of a table of scalars by head, ``(H, R)``, of which two are last."""
    sums = torch.stack([taken.here.sum(1), taken.there.sum(1)], dim=1)
    full = sums.new_zeros(problem.query.size(0) * problem.heads, 2)
    full[wave.sequence : wave.sequence + wave.sequences] = sums
    grad[:, -2:] += full.unflatten(0, (-1, problem.heads)).sum(0)
