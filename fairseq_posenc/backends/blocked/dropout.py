"""Dropout whose random numbers are computed from seeds, and so can be computed again.

Every query and every key of a head draws seeds of 32 bits; those of a pair, mixed by exclusive or
and multiplication, decide whether its weight is dropped. The backward pass mixes them again in
place of storing a number for each pair. torch's own generator takes some ten times as long on a
CPU.

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd, without patterns: the multipliers of these hash functions.
MURMUR, XXHASH = 0x5BD1E995, 0x85EBCA77 - 2**32


def draw(*shape: int, device: torch.device) -> Tensor:
    """Draw seeds from torch's generator, which activation checkpointing rewinds."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def multiplier(rate: float) -> float:
    """Compute the factor of the kept weights, 1 / (1 - rate)."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def keep_threshold(rate: float) -> int:
    """Compute the bound below which 32 random bits, read as a signed number, keep a weight."""
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def sign_dropped(weights: Tensor, rate: float, queries: Tensor, keys: Tensor) -> Tensor:
    """Mark the dropped ones of weights ``(c, M, W)`` with a minus sign.

    One tensor then holds both: of weights ``.2 .3 .5`` with the second dropped, ``.2 -.3 .5``, the
    clamp at 0, ``.2 0 .5``, is applied to the values, and the absolute is the softmax.

    Args:
        weights: none below 0.
        rate: probability of dropping a weight.
        queries: seeds, two for each query, ``(2, c, M)``.
        keys: ``(c, W)``.
    """
    one, other = queries.unsqueeze(-1)  # each [c, M, 1]
    bits = one ^ keys.unsqueeze(-2)  # [c, M, W]
    bits.mul_(MURMUR).bitwise_xor_(other).mul_(XXHASH)
    threshold = keep_threshold(rate)
    if weights.dtype == torch.float64:
        return weights.where(bits < threshold, -weights)
    bits.ge_(threshold).bitwise_left_shift_(31)  # the sign of a float
    return bits.bitwise_or_(weights.view(torch.int32)).view(weights.dtype)
