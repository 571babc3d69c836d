"""Means over the pairs of a query and a key that are equally far apart."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def mean_by_distance(values: Tensor, counted: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """Return the distances j - i that pairs have, and the mean of each over sentences and pairs.

    Args:
        values: of each pair, ``(B, H, T, S)``.
        counted: which pairs count, ``(B, T, S)``; None for all.

    Returns:
        ``(R,)`` and ``(H, R)``, without distances of which no pair counts.
    """
    batch, heads, tgt_len, src_len = values.shape
    if counted is None:
        counted = torch.ones(batch, tgt_len, src_len, dtype=torch.bool)
    values = values.masked_fill(~counted[:, None], 0.0).sum(0).double()
    pairs = torch.arange(src_len) - torch.arange(tgt_len)[:, None] + tgt_len - 1  # from 0
    count = tgt_len + src_len - 1
    sums = torch.zeros(heads, count, dtype=torch.double).index_add(
        1, pairs.flatten(), values.flatten(1)
    )
    number = torch.bincount(pairs.flatten(), counted.sum(0).flatten().double(), count)
    there = number > 0
    distances = torch.arange(count) - tgt_len + 1
    return distances[there], sums[:, there] / number[there]
