"""The sizes that FlexAttention's kernels are compiled for, and tensors of other sizes."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # tokens


def round_length(length: int) -> int:
    """Round a length up to one that kernels are compiled for.

    They are 1, for a step of decoding, and multiples of a tile, from eight tiles on of an eighth of
    a power of two: at most eight kernels for each doubling.
    """
    if length == 1:
        return 1
    step = max(TILE, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def mark_batch_dynamic(*tensors: Tensor | None) -> None:
    """Let the batch of tensors vary from call to call of one kernel."""
    for x in tensors:
        if x is not None and x.size(0) > 1 and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(x, 0)


def index_or_zero(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Find the index of a sentence or head in a dimension that may have one entry for all."""
    return index if x.size(dim) > 1 else torch.zeros_like(index)
