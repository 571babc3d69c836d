"""Rounds lengths up, so that FlexAttention compiles few kernels."""

import torch
from torch import Tensor

TILE = 128  # queries, and keys, of a tile of the block mask


def round_length(length: int) -> int:
    """Round a length up to one that kernels are compiled for.

    These are 1, for a step of decoding, multiples of 128 up to 1,024, and above that multiples of
    an eighth of the next power of two: four lengths in each doubling.
    """
    if length == 1:
        return 1
    step = max(TILE, 2 ** (length - 1).bit_length() // 8)
    return -(-length // step) * step


def mark_batch_dynamic(*tensors: Tensor | None) -> None:
    """Let one compiled kernel serve every size of the first dimension, unless that is 1."""
    for x in tensors:
        if x is not None and x.size(0) > 1 and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(x, 0)


def index_or_zero(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the index, or zeros where the dimension has one entry for all."""
    return index if x.size(dim) > 1 else torch.zeros_like(index)
