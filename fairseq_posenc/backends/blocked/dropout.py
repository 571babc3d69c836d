"""Dropout whose random numbers are computed from seeds, and so can be computed again.

Every query of a head draws two seeds of 32 bits, q and r, and every key draws one seed k. The hash
``(((q ^ k) * MURMUR_MULTIPLIER) ^ r) * XXHASH_MULTIPLIER`` decides whether the weight of a pair is
dropped. Without r, it would depend on ``q ^ k`` alone, and two queries whose seeds q differ in few
bits would drop related keys. The backward pass computes the hash again in place of storing a number
for each pair. torch's own generator takes some ten times as long on a CPU.

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

import torch
from torch import Tensor

# From MurmurHash2 and xxHash32, as signed numbers of 32 bits. They are odd, so multiplying by them
# with int32's overflow maps different numbers to different numbers.
MURMUR_MULTIPLIER = 0x5BD1E995
XXHASH_MULTIPLIER = 0x85EBCA77 - 2**32


def draw_seeds(*shape: int, device: torch.device) -> Tensor:
    """Draw seeds from torch's generator, which activation checkpointing rewinds."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def compute_kept_factor(rate: float) -> float:
    """Compute the factor of the kept weights, for a rate below 1."""
    return 1 / (1 - rate)


def compute_keep_threshold(rate: float) -> int:
    """Compute the threshold: a weight is kept if its hash, an int32, is below it."""
    # Rate 0 gives 2^31, which int32 lacks; with 2^31 - 1 it drops one weight of 2^32.
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def mark_dropped(weights: Tensor, rate: float, query_seeds: Tensor, key_seeds: Tensor) -> Tensor:
    """Negate the dropped weights of ``(c, M, W)``, so that one tensor holds both sets.

    With the second of ``.2 .3 .5`` dropped, the result is ``.2 -.3 .5``: its clamp at 0,
    ``.2 0 .5``, multiplies the values, and its absolute value is the softmax. The factor
    1 / (1 - rate) is left to the caller.

    Args:
        weights: float32 or float64, none below 0.
        rate: probability of dropping a weight.
        query_seeds: two for each query, ``(2, c, M)``.
        key_seeds: one for each key, ``(c, W)``.
    """
    first_seed, second_seed = query_seeds.unsqueeze(-1)  # each [c, M, 1]
    bits = first_seed ^ key_seeds.unsqueeze(-2)  # [c, M, W]
    bits.mul_(MURMUR_MULTIPLIER).bitwise_xor_(second_seed).mul_(XXHASH_MULTIPLIER)
    threshold = compute_keep_threshold(rate)
    if weights.dtype == torch.float64:  # an int32 holds the sign bit of a float32 only
        return weights.where(bits < threshold, -weights)
    bits.ge_(threshold).bitwise_left_shift_(31)  # 1 in the sign bit of dropped weights
    return bits.bitwise_or_(weights.view(torch.int32)).view(weights.dtype)
