"""Which position each token has: padding on either side, sentences in a block, decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError


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
    """The tokens of a call, and where they stand. Padding never shifts a token's position.

    Attributes:
        tokens: ``(B, S)``, the whole prefix when decoding.
        block: ``(B, S)``, each token's position among the real tokens of its row, from 0; or
            ``(1, S)`` when there is no padding. Padding has the position of the real token before
            it, or 0.
        padding_idx: symbol of padding.
        eos_idx: symbol that ends a sentence.
        tgt_len: T, the number of queries; they are the last T tokens.
        left_padded: whether padding comes before a real token in any row.
    """

    tokens: Tensor
    block: Tensor
    padding_idx: int
    eos_idx: int
    tgt_len: int
    left_padded: bool

    @classmethod
    def of(cls, tokens: Tensor, padding_idx: int, eos_idx: int, tgt_len: int) -> Positions:
        """Return the positions of ``tokens``, ``(B, S)``."""
        real = tokens.ne(padding_idx)
        counted = (real.cumsum(1) - 1).clamp(min=0)
        block = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
        moved = real & counted.ne(block)
        # Both questions at once, for all layers: a GPU has to be waited for to answer.
        padded, left_padded = torch.stack([~real.all(), moved.any()]).tolist()
        block = counted if padded else block
        return cls(tokens, block, padding_idx, eos_idx, tgt_len, left_padded)

    def queries(self, x: Tensor) -> Tensor:
        """Return the part of ``x``, ``(B or 1, S, ...)``, that belongs to the queries."""
        return x[:, x.size(1) - self.tgt_len :]

    def common_block(self) -> Tensor:
        """Return positions of which one row, ``(1, S)``, stands for all, or else ``block``.

        One row does where none is padded on the left; padding on the right is then counted too.
        """
        if self.left_padded:
            return self.block
        return torch.arange(self.tokens.size(1), device=self.tokens.device).unsqueeze(0)

    def check_limit(self, limit: int, name: str) -> None:
        """Refuse positions beyond a table of ``limit`` rows.

        Raises:
            UserError: names the limit, the encoding and the option.
        """
        # A GPU is asked only where it can be needed: it would have to be waited for.
        if self.tokens.size(1) > limit and int(self.block.max()) >= limit:
            raise UserError(
                f"a sequence of {int(self.block.max()) + 1} tokens is longer than the {limit} "
                f"positions of {name!r}: raise --max-positions (--max-source-positions, "
                "--max-target-positions) before training, or shorten the input"
            )

    def in_sentence(self) -> Tensor:
        """Return positions ``(B, S)`` in which the first token of every sentence stands at 1.

        The first token of a row, its ``<s>``, stands at 0: ``<s> a b c </s> d e </s>`` is
        0 1 2 3 4 1 2 3. No position is higher than in the block.

        Source: the "real absolute positions" of Huang et al. (2021), section 5.2.
        """
        block = self.block.expand_as(self.tokens)
        ends = torch.where(self.tokens.eq(self.eos_idx), block, torch.zeros_like(block))
        last_end = torch.zeros_like(block)  # before the token, or where the row begins
        last_end[:, 1:] = ends[:, :-1].cummax(1).values
        return block - last_end

    def is_first(self) -> Tensor:
        """Return which token is the first real one of its row, ``(B or 1, S)`` of bool.

        One row stands for all where none is padded on the left.
        """
        if not self.left_padded:
            return torch.eye(1, self.tokens.size(1), dtype=torch.bool, device=self.tokens.device)
        real = self.tokens.ne(self.padding_idx)
        return real & real.cumsum(1).eq(1)
