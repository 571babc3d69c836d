"""Dropout whose random numbers are computed from seeds, and so can be computed again.

Every query of a head draws two seeds of 32 bits, and every key one. A hash of the seeds of a pair
(exclusive or and multiplication) decides whether its weight is dropped; with a single seed for a
query, two queries would drop nearly the same keys, only in another order. The backward pass
computes the hash again in place of storing a number for each pair. torch's own generator takes
some ten times as long on a CPU.

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

import torch
from torch import Tensor

# Odd, without patterns: the multipliers of these hash functions, as signed numbers of 32 bits.
MURMUR, XXHASH = 0x5BD1E995, 0x85EBCA77 - 2**32


def draw_seeds(*shape: int, device: torch.device) -> Tensor:
    """Draw seeds from torch's generator, which activation checkpointing rewinds."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def compute_kept_factor(rate: float) -> float:
    """Compute the factor of the kept weights, 1 / (1 - rate)."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def compute_keep_threshold(rate: float) -> int:
    """Compute the bound below which 32 random bits, read as a signed number, keep a weight."""
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def mark_dropped(weights: Tensor, rate: float, queries: Tensor, keys: Tensor) -> Tensor:
    """Negate the dropped weights of ``(c, M, W)``, so that one tensor holds both sets.

    With the second of ``.2 .3 .5`` dropped, the result is ``.2 -.3 .5``: its clamp at 0,
    ``.2 0 .5``, multiplies the values, and its absolute value is the softmax.

    Args:
        weights: float32 or float64, none below 0.
        rate: probability of dropping a weight.
        queries: seeds, two for each query, ``(2, c, M)``.
        keys: seeds, one for each key, ``(c, W)``.
    """
    first, second = queries.unsqueeze(-1)  # each [c, M, 1]
    bits = first ^ keys.unsqueeze(-2)  # [c, M, W]
    bits.mul_(MURMUR).bitwise_xor_(second).mul_(XXHASH)
    threshold = compute_keep_threshold(rate)
    if weights.dtype == torch.float64:  # the trick with bits is for float32
        return weights.where(bits < threshold, -weights)
    bits.ge_(threshold).bitwise_left_shift_(31)  # the sign of a float
    return bits.bitwise_or_(weights.view(torch.int32)).view(weights.dtype)
