"""Which position each token has: padding on either side, sentences in a block, decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The signed distances ``low .. high`` (inclusive) from a query to a key that a call needs.

    Queries are the last ``tgt_len`` of ``src_len`` positions, in training as in step-by-step
    decoding, so distances run from ``-(src_len - 1)`` to ``tgt_len - 1``.
    """

    low: int
    high: int
    device: torch.device

    @classmethod
    def of(cls, tgt_len: int, src_len: int, device: torch.device) -> Span:
        """Return the distances between the last ``tgt_len`` positions and all ``src_len``."""
        return cls(-(src_len - 1), tgt_len - 1, device)

    def distances(self) -> Tensor:
        """Return the distances as an int64 tensor ``(high - low + 1,)``."""
        return torch.arange(self.low, self.high + 1, device=self.device)


class Positions(NamedTuple):
    """The tokens of a call, from which each encoding derives the positions that it needs.

    Attributes:
        tokens: ``(batch, src_len)``, the whole prefix when decoding.
        padding_idx: symbol of padding.
        eos_idx: symbol that ends a sentence.
        tgt_len: number of queries; they are the last ``tgt_len`` tokens.
    """

    tokens: Tensor
    padding_idx: int
    eos_idx: int
    tgt_len: int

    def queries(self, x: Tensor) -> Tensor:
        """Return the columns of ``x``, ``(batch, src_len)``, that belong to the queries."""
        return x[:, x.size(1) - self.tgt_len :]

    def in_block(self) -> Tensor:
        """Return each token's position among the real tokens of its row, from 0.

        Shape ``(batch, src_len)``, or ``(1, src_len)`` when there is no padding. Padding gets the
        position of the nearest real token before it (0 at the start).
        """
        real = self.tokens.ne(self.padding_idx)
        if bool(real.all()):
            return torch.arange(self.tokens.size(1), device=self.tokens.device).unsqueeze(0)
        return (real.cumsum(1) - 1).clamp(min=0)

    def in_sentence(self) -> Tensor:
        """Return positions ``(batch, src_len)`` that start again at 0 after every end of sentence.

        Source: the "real absolute positions" of Huang et al. (2021), section 5.2.
        """
        ends = self.tokens.eq(self.eos_idx)
        starts_sentence = torch.zeros_like(ends)
        starts_sentence[:, 1:] = ends[:, :-1]
        block = self.in_block().expand_as(self.tokens)
        start = torch.where(starts_sentence, block, torch.zeros_like(block)).cummax(1).values
        return block - start

    def is_first(self) -> Tensor:
        """Return which token is the first real one of its row, ``(batch, src_len)`` of bool."""
        real = self.tokens.ne(self.padding_idx)
        return real & real.cumsum(1).eq(1)
