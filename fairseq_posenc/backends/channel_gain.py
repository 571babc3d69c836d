"""Dot products of queries and keys with a gain for each channel and distance (Huang's method 3)."""

from typing import Any

import torch
from torch import Tensor


class ChannelGain(torch.autograd.Function):
    """Dot products with a gain for each channel, ``sum_t q_it k_jt a_rt``.

    No matrix product computes it, so it is summed channel by channel, forward and backward; then no
    tensor of size T * S * D is ever held. ``gain`` has G tables (1 for all heads, or one each) of R
    rows, and ``index``, ``(1 or B, T, S)``, the row r of each pair.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, gain: Tensor, index: Tensor) -> Tensor:
        """Multiply ``(B, H, T, D)``, ``(B, H, S, D)`` and ``(G, R, D)`` to ``(B, H, T, S)``."""
        ctx.save_for_backward(query, key, gain, index)
        total = query.new_zeros(*query.shape[:3], key.size(2))
        for t in range(query.size(-1)):
            products = query[..., t, None] * key[..., None, :, t]  # [B, H, T, S]
            total += products * _lookup(gain[..., t], index)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute the gradients of query, key and gain."""
        query, key, gain, index = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (query, key, gain)]
        for t in range(query.size(-1)):
            q, k = query[..., t, None], key[..., None, :, t]  # [B, H, T, 1], [B, H, 1, S]
            by_gain = grad * _lookup(gain[..., t], index)
            grads[0][..., t] = (by_gain * k).sum(-1)
            grads[1][..., t] = (by_gain * q).sum(-2)
            grads[2][..., t] = _sum_by_distance(grad * q * k, index, gain.shape[:2])
        return grads[0], grads[1], grads[2], None


def _sum_by_distance(x: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Sum ``(B, H, T, S)`` over equal rows of ``index``: ``(G, R)``."""
    groups, rows = shape
    if groups == 1:
        x = x.sum(1, keepdim=True)  # [B, 1, T, S]
    summed = x.new_zeros(*x.shape[:2], rows)
    flat = index.expand(x.size(0), *index.shape[1:]).flatten(1).unsqueeze(1)  # [B, 1, T * S]
    return summed.scatter_add(-1, flat.expand(-1, x.size(1), -1), x.flatten(2)).sum(0)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table[:, index].transpose(0, 1)  # [1 or B, G, T, S]
