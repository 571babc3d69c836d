"""The random seeds of a call, from which both passes compute the same dropped weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.dropout import draw, multiplier


class Dropout(NamedTuple):
    """The seeds of a call, as those of :mod:`~fairseq_posenc.backends.blocked.dropout`."""

    rate: float  # probability of dropping a weight
    queries: Tensor  # two for each query, `(2, B, H, T)` of int32
    keys: Tensor  # `(B, H, S)` of int32

    @classmethod
    def draw(cls, rate: float, query: Tensor, key: Tensor) -> Dropout:
        """Draw from torch's generator, so a forward pass done again drops the same weights."""
        batch, heads, tgt_len, _ = query.shape
        queries = draw(2, batch, heads, tgt_len, device=query.device)
        return cls(rate, queries, draw(batch, heads, key.size(2), device=query.device))

    @property
    def multiplier(self) -> float:
        """Factor of the kept weights, 1 / (1 - rate)."""
        return multiplier(self.rate)
