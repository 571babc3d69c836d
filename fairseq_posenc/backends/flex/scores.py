"""Builds FlexAttention's ``score_mod``, a function that changes the score of a pair of tokens.

It serves all terms that the backend does not refuse but sinks. The products of tokens with table
rows are computed before; the function looks up the product of its pair by the distance. Reset:
pairs of the first token have two table rows of their own, one where it is the query and one where
it is the key, in place of those of their distances.

B batch, H heads, T queries, S keys, D head size, G tables (1 for all heads, or H), R distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.flex.sizes import index_or_zero, mark_batch_dynamic, round_length
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import (
    ByDistance,
    NumbersByPair,
    RowsByDistance,
    States,
    Term,
)
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Span

# Changes a scaled score, given it and the indices of its sentence, head, query and key.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_NO_MASK = Mask()


class _RowRange(NamedTuple):
    """A range of a table's rows, which is padded to a size of compiled kernels."""

    first: int  # index of its first row in the table
    length: int  # number of rows, without those of a reset
    resets: int  # number of rows of a reset at the end of the table, 0 or 2

    @property
    def gap(self) -> int:
        """The number of rows that pad it."""
        return round_length(max(self.length, 2)) - self.length  # torch compiles a size of 1 apart

    @property
    def size(self) -> int:
        """The number of rows, with padding and reset."""
        return self.length + self.gap + self.resets

    def select(self, table: Tensor) -> Tensor:
        """Select the rows from a table, ``(G, R, ...)``, and pad them to the size."""
        table = at_least_fp32(table)
        rows = table[:, self.first : self.first + self.length]
        gap = rows.new_zeros(1).expand(rows.size(0), self.gap, *rows.shape[2:])
        resets = table[:, table.size(1) - self.resets :]
        return torch.cat([rows, gap, resets], 1)  # [G, size, ...]


def _find_visible_rows(resets: int, tgt_len: int, src_len: int, mask: Mask) -> _RowRange:
    """Find the rows of the distances that a mask leaves visible."""
    limits = mask.locality
    reach = limits.reach(mask.direction) if limits.first_keys is None else None
    reach = src_len if reach is None else reach
    lowest = 0 if mask.direction == "rl" else max(-reach, 1 - src_len)
    highest = 0 if mask.direction == "lr" else min(reach, tgt_len - 1)
    # The tables of the terms begin at the distance 1 - S.
    return _RowRange(lowest + src_len - 1, highest - lowest + 1, resets)


def _span_all_runs(terms: Terms) -> tuple[Terms, int, int]:
    """Replace the ids of tables by a span of distances, so that rows are found by distance.

    The span holds all distances at which a row of any table begins; distances outside of it have
    the rows of its ends.

    Returns:
        The terms, and the lowest and the highest distance of the span.
    """
    all_runs = [x.runs for x in terms if isinstance(x, ByDistance) and x.runs is not None]
    starts = [runs.starts for runs in all_runs if runs.starts]
    low = min((x[0] for x in starts), default=1) - 1
    high = max((x[-1] for x in starts), default=0)

    def respan(term: Term) -> Term:
        if not isinstance(term, ByDistance) or term.runs is None:
            return term
        span = Span(low, high, term.runs.span.device)
        return replace(term, runs=term.runs._replace(span=span))

    return Terms([respan(term) for term in terms]), low, high


class _Products(NamedTuple):
    """Products of queries or keys with the rows of a table."""

    by_row: Tensor  # `(B, H, T or S, size)`
    row_index: Tensor | None  # the row of each distance in a range; None if each has its own

    def look_up(self, b: Tensor, h: Tensor, token: Tensor, row: Tensor) -> Tensor:
        """Look up the product of a token with a row of the range, or with the one it stands for."""
        distinct_row = row if self.row_index is None else self.row_index[row]
        return self.by_row[b, h, token, distinct_row]


def _multiply_rows(
    x: Tensor | None, rows: RowsByDistance | None, row_range: _RowRange, scale: float
) -> _Products | None:
    """Multiply queries, keys or states with a table's rows of a range of distances."""
    if x is None or rows is None:
        return None
    row_index = None
    if rows.runs is not None:
        row_index, row_range = _find_distinct_rows(rows.runs, row_range)
    scaled = at_least_fp32(x) * scale
    return _Products(scaled @ row_range.select(rows.table).transpose(-1, -2), row_index)


def _find_distinct_rows(runs: Runs, row_range: _RowRange) -> tuple[Tensor, _RowRange]:
    """Find the distinct row of each distance in a range, ``(size,)``; return their range, too."""
    row_index = runs.find(runs.span.distances()).narrow(0, row_range.first, row_range.length)
    distinct = _RowRange(0, runs.num_rows, row_range.resets)
    gap = row_index.new_zeros(row_range.gap)
    resets = torch.arange(distinct.size - row_range.resets, distinct.size, device=row_index.device)
    return torch.cat([row_index, gap, resets]), distinct


def _look_up(x: Tensor, b: Tensor, h: Tensor, *tokens: Tensor) -> Tensor:
    """Look up the number of a sentence, a head and tokens; sentence and head may be 1 for all."""
    return x[(index_or_zero(x, 0, b), index_or_zero(x, 1, h), *tokens)]


def _split_parts(decay: Tensor, keys: int) -> list[Tensor]:
    """Split ``(B or 1, H, S, parts)`` into parts, padded to ``keys``."""
    padded = F.pad(decay, (0, 0, 0, keys - decay.size(2)))
    # Copies: FlexAttention's compiler does not take several views of one tensor.
    return [part.contiguous() for part in padded.unbind(-1)]


def build_score_mod(
    terms: Terms,
    tgt_len: int,
    src_len: int,
    device: torch.device,
    mask: Mask = _NO_MASK,
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
        query: ``(B, H, T, D)``, padded to the kernel's length; None if no term has a table.
        key: ``(B, H, S, D)``, padded in the same way.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
        decay: of earlier and later keys, ``(B or 1, H, S, parts)`` each; see
            :class:`AttentionCall`.
    """
    queries = tgt_len if query is None else query.size(2)  # with padding
    keys = src_len if key is None else key.size(2)
    first = terms.first
    resets = 0 if first is None else 2
    ids = next((x.ids for x in terms if isinstance(x, ByDistance) and x.ids is not None), None)
    if ids is None:
        row_range = _find_visible_rows(resets, tgt_len, src_len, mask)
        # Row 0 of the tables has the distance 1 - S, from the last query to the first key. Here,
        # queries are counted from the first one, so j - i is then 1 - T.
        lowest = 1 - tgt_len + row_range.first
    else:
        terms, lowest, highest = _span_all_runs(terms)
        row_range = _RowRange(0, highest - lowest + 1, resets)
        id_query = F.pad(ids[:, src_len - tgt_len :], (0, queries - tgt_len))
        id_key = F.pad(ids, (0, keys - src_len))
        mark_batch_dynamic(id_query, id_key)
    # What differs from call to call is a tensor: a number would be compiled into the kernel.
    shift = torch.tensor(-lowest, device=device)
    last_row = torch.tensor(row_range.length - 1, device=device)
    product = terms.product
    # FlexAttention scales the scores, so summands must be scaled as well, and factors must not.
    scale = 1.0 if query is None or product else terms.scale(query.size(-1))
    by_query = _multiply_rows(query, terms.rows("query"), row_range, scale)
    by_key = _multiply_rows(key, terms.rows("key"), row_range, scale)
    states = None
    if (of_queries := terms.find(States)) is not None:
        states = F.pad(of_queries.vectors, (0, 0, 0, queries - tgt_len))
    by_state = _multiply_rows(states, terms.rows("state"), row_range, 1.0)
    gain, bias = (
        None if numbers is None else row_range.select(numbers.expand())
        for numbers in (terms.gain, terms.bias)
    )
    pair_bias = None
    if (by_pair := terms.find(NumbersByPair)) is not None:
        missing = (0, keys - src_len, 0, queries - tgt_len)
        pair_bias = F.pad(at_least_fp32(by_pair.numbers), missing)
    softcap = terms.softcap
    if first is not None:
        first_query = F.pad(first[:, src_len - tgt_len :], (0, queries - tgt_len))
        first_key = F.pad(first, (0, keys - src_len))
        mark_batch_dynamic(first_query, first_key)
    if temperature is not None:
        temperature = F.pad(temperature, (0, queries - tgt_len))
    products = [x.by_row for x in (by_query, by_key, by_state) if x is not None]
    mark_batch_dynamic(*products, pair_bias, temperature)
    past = torch.tensor(src_len - tgt_len, device=device)  # index of the first query
    earlier, later = (None if c is None else _split_parts(c, keys) for c in decay)
    mark_batch_dynamic(*(earlier or ()), *(later or ()))

    def compute_decay(parts: Sequence[Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        """Compute c_i - c_j from the parts of c."""
        i = (i + past).clamp(max=keys - 1)  # a padded query may stand beyond all keys
        return sum(_look_up(c, b, h, i) - _look_up(c, b, h, j) for c in parts)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i
        if ids is not None:
            b_key = index_or_zero(ids, 0, b)
            distance = id_key[b_key, j] - id_query[b_key, i]
        # A hidden pair may have any row; distances of ids beyond the span have those of its ends.
        row = (distance + shift).clamp(min=0).minimum(last_row)
        if first is not None:  # for the first token as query and key, the query's row counts
            row = torch.where(first_key[index_or_zero(first, 0, b), j], row_range.size - 1, row)
            row = torch.where(first_query[index_or_zero(first, 0, b), i], row_range.size - 2, row)
        if gain is not None:
            score = score * gain[index_or_zero(gain, 0, h), row]
        if by_query is not None:
            term = by_query.look_up(b, h, i, row)
            score = score * term if product else score + term
        if by_key is not None:
            term = by_key.look_up(b, h, j, row)
            score = score * term if product else score + term
        if bias is not None:
            score = score + bias[index_or_zero(bias, 0, h), row]
        if pair_bias is not None:
            score = score + _look_up(pair_bias, b, h, i, j)
        if by_state is not None:
            score = score + by_state.look_up(b, h, i, row)
        if earlier is not None and later is not None:
            is_later = j > i + past
            score = score + torch.where(
                is_later, compute_decay(later, b, h, i, j), compute_decay(earlier, b, h, i, j)
            )
        elif earlier is not None:
            score = score + compute_decay(earlier, b, h, i, j)
        if temperature is not None:
            score = score * _look_up(temperature, b, h, i)
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return modify
