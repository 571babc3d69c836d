"""The scores of encodings as a function of a pair of tokens: FlexAttention's ``score_mod``.

It serves tables by distance, gain, biases, reset, temperature and decay; values and sinks are the
backend's. Reset: pairs of the first token have two table rows of their own, one where it is the
query and one where it is the key, in place of those of their distances.

B batch, H heads, T queries, S keys, D head size, G tables (1 for all heads, or H), R distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import score_scale
from fairseq_posenc.backends.flex.sizes import index_or_zero, mark_batch_dynamic, round_length
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.terms import Terms

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_ALL = Mask()


class _VisibleRows(NamedTuple):
    """The rows of the visible distances in the tables of a call."""

    first: int  # index of the first visible row in the tables of the terms
    number: int  # visible rows
    size: int  # rows of the padded tables, with the reset's two at their end
    reset: bool  # whether the tables have those

    def select(self, table: Tensor) -> Tensor:
        """Select the visible rows of a table, ``(G, R, ...)``, and pad them to the size."""
        table = at_least_fp32(table)
        rows = table[:, self.first : self.first + self.number]
        missing = self.size - 2 * self.reset - self.number
        gap = rows.new_zeros(1).expand(rows.size(0), missing, *rows.shape[2:])
        resets = [table[:, -2:]] if self.reset else []
        return torch.cat([rows, gap, *resets], 1)  # [G, size, ...]


def _split_in_two(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Split numbers in float64 into two in float32, whose differences lose nothing."""
    coarse = decay.float()
    rest = (decay - coarse).float()
    mark_batch_dynamic(coarse, rest)
    return coarse, rest


def build_score_mod(
    terms: Terms,
    tgt_len: int,
    src_len: int,
    device: torch.device,
    mask: Mask = _ALL,
    query: Tensor | None = None,
    key: Tensor | None = None,
    temperature: Tensor | None = None,
    decay: tuple[Tensor | None, Tensor | None] = (None, None),
) -> ScoreMod:
    """Make the function of a scaled score that FlexAttention takes.

    Args:
        terms: of the encodings, added to the scores.
        tgt_len: T.
        src_len: S.
        device: of the terms.
        mask: the keys that a query may see; rows of hidden distances are left out.
        query: ``(B, H, T, D)``, filled up to the kernel's length; for terms that have a table.
        key: ``(B, H, S, D)``, likewise.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
        decay: of earlier and later keys, ``(B or 1, H, S)`` each; see :class:`AttentionCall`.
    """
    queries = tgt_len if query is None else query.size(2)
    keys = src_len if key is None else key.size(2)
    reach = mask.locality.reach(mask.direction)
    reach = src_len if reach is None else reach
    lowest = 0 if mask.direction == "rl" else max(-reach, 1 - src_len)  # visible distance
    highest = 0 if mask.direction == "lr" else min(reach, tgt_len - 1)
    number = highest - lowest + 1
    reset = terms.first is not None
    size = round_length(max(number, 2)) + 2 * reset
    # The tables of the terms begin at the distance 1 - S.
    rows = _VisibleRows(lowest + src_len - 1, number, size, reset)
    # What differs from call to call is a tensor: a number would be compiled into the kernel.
    shift = torch.tensor(tgt_len - src_len - lowest, device=device)
    last_row = torch.tensor(number - 1, device=device)

    def multiply_rows(x: Tensor | None, table: Tensor | None) -> Tensor | None:
        if x is None or table is None:
            return None
        # The scores come scaled: what is added to them has to be, and what multiplies them not.
        scale = 1.0 if terms.product else score_scale(terms, x.size(-1))
        return (at_least_fp32(x) * scale) @ rows.select(table).transpose(
            -1, -2
        )  # [B, H, T or S, R]

    by_query = multiply_rows(query, terms.query_table)  # [B, H, T, R]
    by_key = multiply_rows(key, terms.key_table)  # [B, H, S, R]
    gain = None if terms.gain is None else rows.select(terms.gain)
    bias = None if terms.bias is None else rows.select(terms.bias)
    pair_bias, first = terms.pair_bias, terms.first
    if pair_bias is not None:
        pair_bias = F.pad(at_least_fp32(pair_bias), (0, keys - src_len, 0, queries - tgt_len))
    if first is not None:
        first_query = F.pad(first[:, src_len - tgt_len :], (0, queries - tgt_len))
        first_key = F.pad(first, (0, keys - src_len))
        mark_batch_dynamic(first_query, first_key)
    if temperature is not None:
        temperature = F.pad(temperature, (0, queries - tgt_len))
    mark_batch_dynamic(by_query, by_key, pair_bias, temperature)
    offset = torch.tensor(src_len - tgt_len, device=device)
    earlier, later = (
        None if c is None else _split_in_two(F.pad(c, (0, keys - src_len))) for c in decay
    )

    def decay_of_pair(
        parts: tuple[Tensor, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor
    ) -> Any:
        """Compute c_i - c_j from both parts of c."""
        coarse, rest = parts
        b, h = index_or_zero(coarse, 0, b), index_or_zero(coarse, 1, h)
        i = (i + offset).clamp(max=keys - 1)
        return (coarse[b, h, i] - coarse[b, h, j]) + (rest[b, h, i] - rest[b, h, j])

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (j - i + shift).clamp(min=0).minimum(last_row)  # of hidden pairs too
        if first is not None:  # where the first token meets itself, the query's row counts
            row = torch.where(first_key[index_or_zero(first, 0, b), j], rows.size - 1, row)
            row = torch.where(first_query[index_or_zero(first, 0, b), i], rows.size - 2, row)
        if gain is not None:
            score = score * gain[index_or_zero(gain, 0, h), row]
        if by_query is not None:
            term = by_query[b, h, i, row]
            score = score * term if terms.product else score + term
        if by_key is not None:
            term = by_key[b, h, j, row]
            score = score * term if terms.product else score + term
        if bias is not None:
            score = score + bias[index_or_zero(bias, 0, h), row]
        if pair_bias is not None:
            score = (
                score
                + pair_bias[index_or_zero(pair_bias, 0, b), index_or_zero(pair_bias, 1, h), i, j]
            )
        if earlier is not None and later is not None:
            is_later = j > i + offset
            score = score + torch.where(
                is_later, decay_of_pair(later, b, h, i, j), decay_of_pair(earlier, b, h, i, j)
            )
        elif (only := earlier or later) is not None:
            score = score + decay_of_pair(only, b, h, i, j)
        if temperature is not None:
            score = (
                score
                * temperature[index_or_zero(temperature, 0, b), index_or_zero(temperature, 1, h), i]
            )
        return score

    return modify
