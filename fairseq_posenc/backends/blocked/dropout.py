"""Dropout whose random numbers are computed from keys, and so can be computed again.

Every query and every key of a head draws keys of 32 bits; those of a pair, mixed by exclusive or
and multiplication, decide whether its weight is kept. The backward pass mixes them again in place
of storing a number for each pair. torch's own generator takes some ten times as long on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Odd, without patterns: the multipliers of the hash functions Murmur2 and xxHash.
FIRST, SECOND = 0x5BD1E995, 0x85EBCA77 - 2**32


class Dropout(NamedTuple):
    """The keys of a call.

    Attributes:
        rate: probability of dropping a weight.
        queries: two for each query, last query first, ``(2, B, H, T)`` of int32.
        keys: ``(B, H, S)`` of int32.
    """

    rate: float
    queries: Tensor
    keys: Tensor

    @classmethod
    def draw(
        cls, rate: float, shape: tuple[int, int, int], src_len: int, device: torch.device
    ) -> Dropout:
        """Draw keys from torch's generator, which activation checkpointing rewinds.

        Args:
            rate: probability of dropping a weight.
            shape: B, H, T.
            src_len: S.
            device: of the keys.
        """

        def numbers(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)

        return cls(rate, numbers(2, *shape), numbers(*shape[:2], src_len))

    @property
    def gain(self) -> float:
        """What the kept weights are multiplied by."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0

    def kept(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """Return all bits set for a weight that is kept, else none: ``(c, M, W)`` of int32."""
        first, second = self.queries[:, batch, heads, queries].flatten(1, 2).unsqueeze(-1)
        bits = first ^ self.keys[batch, heads, keys].flatten(0, 1).unsqueeze(-2)
        bits.mul_(FIRST).bitwise_xor_(second).mul_(SECOND)
        threshold = min(round((1 - self.rate) * 2**32) - 2**31, 2**31 - 1)
        return bits.lt_(threshold).neg_()


def keep(x: Tensor, kept: Tensor) -> Tensor:
    """Return ``x`` with zeros where bits of :meth:`Dropout.kept`, overwritten, are not set."""
    kind = torch.int64 if x.dtype == torch.float64 else torch.int32
    return kept.to(kind).bitwise_and_(x.view(kind)).view(x.dtype)
