"""The reset's two rows outside the kernels: their products with queries, keys and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
