"""Rows of tables that no view has in the pairs' places: each pair's row is looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.base import Mask, by_distance, with_reset
from fairseq_posenc.encodings.terms import Terms


def row_index(terms: Terms, tgt_len: int, src_len: int, device: torch.device, mask: Mask) -> Tensor:
    """Return the table row of each query and key, ``(1 or B, T, S)`` of int64.

    The mask only says what layers make once.
    """
    of = (terms.first, tgt_len, src_len, device)
    return mask.made("rows", of, lambda: _row_index(*of))


def _row_index(first: Tensor | None, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
    rows = tgt_len + src_len - 1
    index = torch.arange(rows, device=device)[None]
    pairs = by_distance(index, tgt_len, src_len)
    if first is not None:
        pairs = with_reset(pairs, rows, rows + 1, first)
    return pairs[:, 0]


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[b, h, t, index[b, t, s]]`` of ``(B, H, T, R)``: ``(B, H, T, S)``."""
    shape = (*x.shape[:3], index.size(-1))
    return x.gather(-1, index.unsqueeze(1).expand(shape))


class ChannelGain(torch.autograd.Function):
    """Dot products with a gain for each channel, ``sum_t q_it k_jt a_rt``.

    No matrix product computes it, so it is summed channel by channel, forward and backward; then no
    tensor of size T * S * D is ever held.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, gain: Tensor, index: Tensor) -> Tensor:
        """Return ``(B, H, T, S)`` of ``(B, H, T, D)``, ``(B, H, S, D)``, ``(G, R, D)``."""
        ctx.save_for_backward(query, key, gain, index)
        total = query.new_zeros(*query.shape[:3], key.size(2))
        for t in range(query.size(-1)):
            products = query[..., t, None] * key[..., None, :, t]
            total += products * _picked(gain[..., t], index)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of query, key and gain."""
        query, key, gain, index = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (query, key, gain)]
        for t in range(query.size(-1)):
            q, k = query[..., t, None], key[..., None, :, t]
            by_gain = grad * _picked(gain[..., t], index)
            grads[0][..., t] = (by_gain * k).sum(-1)
            grads[1][..., t] = (by_gain * q).sum(-2)
            grads[2][..., t] = _sum_by_distance(grad * q * k, index, gain.shape[:2])
        return grads[0], grads[1], grads[2], None


def _sum_by_distance(x: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Return the sums of ``(B, H, T, S)`` over equal rows of ``index``: ``(G, R)``."""
    groups, rows = shape
    if groups == 1:
        x = x.sum(1, keepdim=True)
    summed = x.new_zeros(*x.shape[:2], rows)
    flat = index.expand(x.size(0), *index.shape[1:]).flatten(1).unsqueeze(1)
    return summed.scatter_add(-1, flat.expand(-1, x.size(1), -1), x.flatten(2)).sum(0)


def _picked(table: Tensor, index: Tensor) -> Tensor:
    return table[:, index].transpose(0, 1)
