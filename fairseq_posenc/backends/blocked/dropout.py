"""Dropout whose random numbers are computed from seeds, and so can be computed again.

Every query and every key of a head draws seeds of 32 bits; those of a pair, mixed by exclusive or
and multiplication, decide whether its weight is dropped. The backward pass mixes them again in
place of storing a number for each pair. torch's own generator takes some ten times as long on a
CPU.
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
    """Return what the weights that are left are multiplied by."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def survivors(rate: float, queries: Tensor, keys: Tensor) -> Tensor:
    """Return all bits set for a weight that is not dropped, else none: ``(c, M, W)`` of int32.

    Args:
        rate: probability of dropping a weight.
        queries: seeds, two for each query, ``(2, c, M)``.
        keys: ``(c, W)``.
    """
    one, other = queries.unsqueeze(-1)
    bits = one ^ keys.unsqueeze(-2)
    bits.mul_(MURMUR).bitwise_xor_(other).mul_(XXHASH)
    threshold = min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)
    return bits.lt_(threshold).neg_()


def drop(x: Tensor, bits: Tensor) -> Tensor:
    """Return ``x`` with zeros where bits of :func:`survivors`, overwritten, are not set."""
    kind = torch.int64 if x.dtype == torch.float64 else torch.int32
    return bits.to(kind).bitwise_and_(x.view(kind)).view(x.dtype)
