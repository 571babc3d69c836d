"""The arguments of the kernels: what a call of attention comes to, as tensors, sizes and strides.

This module alone reads :mod:`~fairseq_posenc.encodings.term`. A kernel reads the fields of
these NamedTuples by name, and is compiled without those that are None.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table. A distance is the index of a key minus the index of a query, both from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import dropout
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.term import RowsByDistance
from fairseq_posenc.errors import UserError


class Ranges(NamedTuple):
    """The keys that each query may see, and so the queries that may see each key.

    Both numbers of a pair never fall from one query, or key, to the next one. All are int32, of
    shape ``(B or 1, T)`` or ``(B or 1, S)``.
    """

    first_keys: Tensor  # the first key that a query may see
    last_keys: Tensor  # the last one
    first_queries: Tensor  # the first query that may see a key
    last_queries: Tensor  # the last one; below the first if there is none


class Dropout(NamedTuple):
    """The seeds of a call, from which both passes compute the same dropped weights.

    The hash of a pair is ``multiplier * key_seed + offset``, an int32 that wraps round. Its pairs
    are as good as independent, and it takes three instructions.
    """

    multipliers: Tensor  # of each query, `(B, H, T)` of int32
    offsets: Tensor  # of each query, `(B, H, T)` of int32
    key_seeds: Tensor  # of each key, `(B, H, S)` of int32
    rate: float  # probability of dropping a weight

    @classmethod
    def draw(cls, rate: float, query: Tensor, key: Tensor) -> Dropout:
        """Draw from torch's generator, so a forward pass done again drops the same weights."""
        multipliers, offsets = dropout.draw_seeds(2, *query.shape[:3], device=query.device)
        key_seeds = dropout.draw_seeds(*key.shape[:3], device=query.device)
        return cls(multipliers, offsets, key_seeds, rate)


class Settings(NamedTuple):
    """The arguments of a call other than its inputs, the tensors that may have gradients."""

    padding: Tensor | None  # `(B, S)` of uint8, 1 for keys that no query may see
    pairs: Tensor | None  # `(T, S)` of uint8, 1 where a query must not see a key
    ranges: Ranges | None  # None if every query may see all keys
    dropout: Dropout | None  # None for no dropout
    scale: float  # factor of the combined dot products
    product: bool  # whether the parts of a score are multiplied, else added
    query_low: int  # distance of the query table's first row
    key_low: int  # distance of the key table's first row


class Inputs(NamedTuple):
    """The tensors of a call that may have gradients.

    A vector table has a row for each of some consecutive distances; its first row serves all lower
    distances too, its last row all higher ones. Gain and bias have a number for each distance.
    """

    query: Tensor  # `(B, H, T, D)`, contiguous like keys and values
    key: Tensor  # `(B, H, S, D)`
    value: Tensor  # `(B, H, S, D)`
    query_table: Tensor | None  # `(G, R, D)`
    key_table: Tensor | None  # `(G, R, D)`
    gain: Tensor | None  # `(G, T + S - 1)`
    bias: Tensor | None  # `(G, T + S - 1)`


def read_call(call: AttentionCall) -> tuple[Settings, Inputs]:
    """Read a call's tensors and settings, with heads repeated and all of the values' type."""
    call = call.with_all_heads()
    query, key, value, terms, mask, rate, _ = call
    # Under autocast, a norm makes queries and keys float32.
    query, key, value = (x.type_as(value).contiguous() for x in (query, key, value))
    tgt_len, src_len = query.size(2), key.size(2)
    past = src_len - tgt_len
    query_table, query_low = _read_vectors(terms.rows("query"), src_len)
    key_table, key_low = _read_vectors(terms.rows("key"), src_len)
    gain, bias = (x if x is None else x.expand() for x in (terms.gain, terms.bias))
    settings = Settings(
        padding=_view_as_uint8(mask.key_padding),
        pairs=_view_as_uint8(mask.pairs),
        ranges=find_ranges(mask, tgt_len, src_len, query.device),
        dropout=Dropout.draw(rate, query, key) if rate else None,
        scale=terms.scale(query.size(-1)),
        product=terms.product,
        query_low=query_low + past,
        key_low=key_low + past,
    )
    return settings, Inputs(query, key, value, query_table, key_table, gain, bias)


def _read_vectors(rows: RowsByDistance | None, src_len: int) -> tuple[Tensor | None, int]:
    """Read a vector table, and the signed distance of its first row, with queries at the end."""
    if rows is None:
        return None, 1 - src_len
    table, runs = rows.table, rows.runs
    if runs is None:
        return table, 1 - src_len
    if not runs.starts:  # one row for all distances
        return table, 0
    low, high = runs.starts[0] - 1, runs.starts[-1]
    if isinstance(runs.starts, range):
        return table, low
    # Rows that serve several distances, as of buckets: repeated between the ends.
    return runs.look_up(table, 1, torch.arange(low, high + 1, device=table.device)), low


def find_ranges(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> Ranges | None:
    """Find the ranges of a mask, once for all layers; None if every query may see all keys.

    Raises:
        UserError: the keys that a query may see are not a range.
    """
    if mask.direction == "both" and not mask.locality.limits:
        return None
    deps = (*mask.cache_deps, tgt_len, src_len, device)
    return mask.cached("ranges", deps, lambda: _compute_ranges(mask, tgt_len, src_len, device))


def _compute_ranges(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> Ranges:
    found = mask.find_visible_ranges(tgt_len, src_len, device)
    if found is None:
        raise UserError(
            "position backend triton needs documents whose numbers ascend, and does not compile "
            "them: choose the backend blocked"
        )
    # `contiguous` because searchsorted copies other tensors, with a warning.
    first_keys, last_keys = (x.contiguous() for x in torch.broadcast_tensors(*found))
    keys = torch.arange(src_len, device=device).expand(len(first_keys), -1).contiguous()
    first_queries = torch.searchsorted(last_keys, keys)
    last_queries = torch.searchsorted(first_keys, keys, right=True) - 1
    return Ranges(*(x.int() for x in (first_keys, last_keys, first_queries, last_queries)))


def _view_as_uint8(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


class Table(NamedTuple):
    """A table by distance, of vectors or of numbers."""

    rows: Tensor  # `(G, R, D)` of the queries' type, or `(G, R)` of float32; contiguous
    head_stride: int  # numbers from one head's rows to the next one's; 0 if the heads share them
    low: int  # distance of the first row
    last: int  # index of the last row, R - 1


class Problem(NamedTuple):
    """The inputs of all kernels. All tensors are contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_table: Table | None
    key_table: Table | None
    gain: Table | None
    bias: Table | None
    padding: Tensor | None
    pairs: Tensor | None
    ranges: Ranges | None
    range_strides: tuple[int, int]  # from one sentence's ranges to the next: of queries, of keys
    dropout: Dropout | None
    keep_threshold: int  # a hash below it keeps a weight
    kept_factor: float  # factor of the kept weights, 1 / (1 - rate)
    scale: float
    far_low: int  # up to this distance, every vector table has its first row
    far_high: int  # from this distance on, every vector table has its last row
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    width: int  # D

    @property
    def has_vectors(self) -> bool:
        """Whether any table has vectors."""
        return self.query_table is not None or self.key_table is not None

    @property
    def is_clipped(self) -> bool:
        """Whether a row at the end of a vector table serves several distances."""
        tables = [x for x in (self.query_table, self.key_table) if x is not None]
        return any(
            table.low > 1 - self.tgt_len or table.low + table.last < self.src_len - 1
            for table in tables
        )


def build_problem(settings: Settings, inputs: Inputs) -> Problem:
    """Build the arguments of the kernels."""
    query, key, value, query_table, key_table, gain, bias = inputs
    tgt_len, src_len = query.size(2), key.size(2)

    def describe(table: Tensor | None, low: int, dtype: torch.dtype) -> Table | None:
        if table is None:
            return None
        rows = table.to(dtype).contiguous()
        return Table(rows, rows[0].numel() if len(rows) > 1 else 0, low, rows.size(1) - 1)

    queries = describe(query_table, settings.query_low, query.dtype)
    # Before they may be copied: the kernels load the rows of one table once.
    is_shared = settings.query_low == settings.key_low and _share_memory(query_table, key_table)
    keys = queries if is_shared else describe(key_table, settings.key_low, query.dtype)
    vectors = [table for table in (queries, keys) if table is not None]
    ranges = settings.ranges
    per_sentence = ranges is not None and len(ranges.first_keys) > 1
    rate = 0.0 if settings.dropout is None else settings.dropout.rate
    return Problem(
        query=query,
        key=key,
        value=value,
        query_table=queries,
        key_table=keys,
        gain=describe(gain, 1 - tgt_len, torch.float32),
        bias=describe(bias, 1 - tgt_len, torch.float32),
        padding=settings.padding,
        pairs=settings.pairs,
        ranges=ranges,
        range_strides=(tgt_len, src_len) if per_sentence else (0, 0),
        dropout=settings.dropout,
        keep_threshold=dropout.compute_keep_threshold(rate),
        kept_factor=dropout.compute_kept_factor(rate),
        scale=settings.scale,
        far_low=min((table.low for table in vectors), default=0),
        far_high=max((table.low + table.last for table in vectors), default=0),
        heads=query.size(1),
        tgt_len=tgt_len,
        src_len=src_len,
        width=query.size(3),
    )


def _share_memory(first: Tensor | None, second: Tensor | None) -> bool:
    """Check whether two tables are the same numbers.

    After autograd has saved it, one table comes back as two tensors.
    """
    if first is None or second is None:
        return False
    same_layout = first.shape == second.shape and first.stride() == second.stride()
    return same_layout and first.data_ptr() == second.data_ptr()
