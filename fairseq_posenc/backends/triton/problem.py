"""The arguments of the kernels: a call of attention as tensors, sizes and strides.

A kernel reads fields of these NamedTuples by name, and is compiled without fields that are None.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table. A distance is the index of a key minus the index of a query, both from 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton import language as tl

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import dropout
from fairseq_posenc.encodings.term import RowsByDistance
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import Mask


class Visible(NamedTuple):
    """The keys that each query may see, or the queries that may see each key."""

    first: Tensor  # `(B or 1, tokens)` of int32; never lower than for the token before
    last: Tensor  # the same; below the first for a token that sees none
    stride: int  # from one sentence's tokens to the next one's; 0 if all sentences share them


class Dropout(NamedTuple):
    """The seeds of a call, from which both passes compute the same dropped weights.

    The hash of a pair is ``multiplier * key_seed + offset``, an int32 that wraps round. Any two
    hashes are practically independent. Hash, comparison and choice take an instruction each.
    """

    query_seeds: Tensor  # `(B, H, T, 1)` of int64: multiplier, and offset in the upper half
    key_seeds: Tensor  # `(B, H, S)` of int32
    threshold: int  # a hash below it keeps a weight


class Table(NamedTuple):
    """A table by distance, of vectors or of numbers.

    A vector table has a row for each of some consecutive distances; its first row serves all lower
    distances too, its last row all higher ones. A table of numbers has all distances.
    """

    rows: Tensor  # `(G, R, D)` of the queries' type, or `(G, R)` of float32; contiguous
    head_stride: int  # numbers from one head's rows to the next one's; 0 if the heads share them
    low: int  # distance of the first row
    last: int  # index of the last row, R - 1


class Problem(NamedTuple):
    """The inputs of all kernels. All tensors are contiguous.

    The score of query i and key j is scale * (gain_r q_i.k_j + q_i.Q_r + k_j.K_r) + bias_r, where r
    is their distance and Q, K, gain and bias are the tables; terms of missing tables are left out.
    With PRODUCT it is scale * gain_r q_i.k_j * (q_i.Q_r) * (k_j.K_r) + bias_r.
    """

    query: Tensor  # `(B, H, T, D)`
    key: Tensor  # `(B, H, S, D)`
    value: Tensor  # `(B, H, S, D)`
    query_table: Table | None
    key_table: Table | None
    gain: Table | None
    bias: Table | None
    padding: Tensor | None  # `(B, S)` of uint8, 1 for keys that no query may see
    pairs: Tensor | None  # `(T, S)` of uint8, 1 where a query must not see a key
    visible_keys: Visible | None  # of each query; None if every query may see all keys
    visible_queries: Visible | None  # of each key
    dropout: Dropout | None
    kept_factor: float  # factor of the kept weights, 1 / (1 - rate)
    scale: float  # 1 / sqrt(scale_factor * D)
    far_low: int  # up to this distance, every vector table has its first row
    far_high: int  # from this distance on, every vector table has its last row
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    width: int  # D
    PRODUCT: tl.constexpr  # whether the dot products are multiplied, not added
    SHARED: tl.constexpr  # whether queries and keys have one table
    CLIPPED: tl.constexpr  # whether a row at the end of a vector table serves several distances

    @property
    def tables(self) -> tuple[Table | None, ...]:
        """The four tables, of queries, of keys, gain and bias; None for a missing one."""
        return self.query_table, self.key_table, self.gain, self.bias

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensors that may have gradients: queries, keys, values, and the rows of tables."""
        return [self.query, self.key, self.value, *(x and x.rows for x in self.tables)]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "Problem":
        """Replace the tensors, in the order of :attr:`tensors`; the first 7 fields have them."""
        tables = [old and old._replace(rows=new) for old, new in zip(self.tables, tensors[3:])]  # type: ignore[arg-type]
        return Problem(*tensors[:3], *tables, *self[7:])  # type: ignore[call-arg, arg-type]


def read_call(call: AttentionCall) -> Problem:
    """Read a call, with heads repeated and all vectors of the values' type.

    Raises:
        UserError: the keys that a query may see are not a range.
    """
    query, key, value, terms, mask, rate, _ = call.with_all_heads()
    # Under autocast, a norm makes queries and keys float32.
    query, key, value = (x.type_as(value).contiguous() for x in (query, key, value))
    tgt_len, src_len = query.size(2), key.size(2)
    of_queries, of_keys = terms.rows("query"), terms.rows("key")
    query_table = _read_vectors(of_queries, tgt_len, src_len, query.dtype)
    shared = False
    if of_queries is not None and of_keys is not None:  # perhaps the same rows, as those of m4
        shared = of_queries.table is of_keys.table and of_queries.runs is of_keys.runs
    key_table = query_table if shared else _read_vectors(of_keys, tgt_len, src_len, query.dtype)
    lows = [table.low for table in (query_table, key_table) if table]  # distances of first rows
    highs = [table.low + table.last for table in (query_table, key_table) if table]
    clipped = any(low > 1 - tgt_len for low in lows) or any(high < src_len - 1 for high in highs)
    seeds = None
    if rate:  # from torch's generator, so that a forward pass done again drops the same weights
        of_query = dropout.draw_seeds(*query.shape[:3], 2, device=query.device).view(torch.int64)
        of_key = dropout.draw_seeds(*key.shape[:3], device=query.device)
        seeds = Dropout(of_query, of_key, dropout.compute_keep_threshold(rate))
    visible_keys, visible_queries = find_visible(mask, tgt_len, src_len, query.device)
    return Problem(
        query=query,
        key=key,
        value=value,
        query_table=query_table,
        key_table=key_table,
        gain=None if terms.gain is None else _describe(terms.gain.expand().float(), 1 - tgt_len),
        bias=None if terms.bias is None else _describe(terms.bias.expand().float(), 1 - tgt_len),
        padding=_view_as_uint8(mask.key_padding),
        pairs=_view_as_uint8(mask.pairs),
        visible_keys=visible_keys,
        visible_queries=visible_queries,
        dropout=seeds,
        kept_factor=1 / (1 - rate),
        scale=terms.scale(query.size(-1)),
        far_low=min(lows, default=0),
        far_high=max(highs, default=0),
        heads=query.size(1),
        tgt_len=tgt_len,
        src_len=src_len,
        width=query.size(3),
        PRODUCT=tl.constexpr(terms.product),
        SHARED=tl.constexpr(shared),
        CLIPPED=tl.constexpr(clipped),
    )


def _read_vectors(
    rows: RowsByDistance | None, tgt_len: int, src_len: int, dtype: torch.dtype
) -> Table | None:
    """Read a vector table; its runs take queries as the last T tokens, kernels as the first."""
    if rows is None:
        return None
    table, runs, low = rows.table, rows.runs, 1 - src_len  # without runs, it has all distances
    if runs is not None and not runs.starts:  # one row for all distances
        low = 0
    elif runs is not None:  # `starts` has the first distance of each row but the first one
        low, high = runs.starts[0] - 1, runs.starts[-1]  # kernels repeat the rows of these two
        if not isinstance(runs.starts, range):  # a range: each row between serves one distance
            # Rows between them may serve several distances, as those of buckets: repeat them.
            table = runs.look_up(table, torch.arange(low, high + 1, device=table.device))
    return _describe(table.to(dtype), low + src_len - tgt_len)


def _describe(rows: Tensor, low: int) -> Table:
    """Describe a table whose first row has the distance ``low``."""
    return Table(rows.contiguous(), rows[0].numel() if len(rows) > 1 else 0, low, rows.size(1) - 1)


def _view_as_uint8(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def find_visible(
    mask: Mask, tgt_len: int, src_len: int, device: torch.device
) -> tuple[Visible, Visible] | tuple[None, None]:
    """Find the keys that each query may see, and the queries that may see each key.

    They are computed once for all layers, and None if every query may see all keys.

    Raises:
        UserError: the keys that a query may see are not a range.
    """
    if mask.direction == "both" and not mask.has_limits:
        return None, None

    def compute() -> tuple[Visible, Visible]:
        found = mask.find_visible_ranges(tgt_len, src_len, device)
        if found is None:  # documents' numbers descend: `refuses` excludes the other causes
            raise UserError(
                "position backend triton needs documents whose numbers ascend: choose blocked"
            )
        # Both ascend: queries from the first with last >= k to the last with first <= k see key k.
        first, last = (x.contiguous() for x in found)  # [B or 1, T]; `searchsorted` warns of others
        keys = torch.arange(src_len, device=device).expand(len(first), -1).contiguous()
        first_query = torch.searchsorted(last, keys)
        last_query = torch.searchsorted(first, keys, right=True) - 1
        shared = len(first) == 1
        of_queries = Visible(first.int(), last.int(), 0 if shared else tgt_len)
        of_keys = Visible(first_query.int(), last_query.int(), 0 if shared else src_len)
        return of_queries, of_keys

    return mask.cached("visible keys", (*mask.cache_deps, tgt_len, src_len, device), compute)
