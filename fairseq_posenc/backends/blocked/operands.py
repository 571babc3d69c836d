"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Each ``lay_out_...`` returns some fields of :class:`Operands`. The letters of shapes are those of
:mod:`~fairseq_posenc.backends.blocked.geometry`; W is also the width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.geometry import Chunk, Geometry
from fairseq_posenc.backends.blocked.reset import find_first_tokens
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms

# Added to the score of a forbidden pair: below any score. `distance_bias`, `window_bias` and
# `mask_bias` may all forbid the same pair, and their sum is still finite in float32.
FORBIDDEN = -1e38
# Fields `(G, R, ...)`, of which a chunk gets its heads. A field that is neither here nor in BY_PAIR
# is `(B, H, ...)`.
BY_DISTANCE = {
    "query_table",
    "key_table",
    "value_table",
    "state_table",
    "query_row_index",
    "key_row_index",
    "value_row_index",
    "state_row_index",
    "gain",
    "bias",
    "distance_bias",
    "window_bias",
    "is_later",
}
# Fields `(B or 1, G, ...)`, of which a chunk gets its sentences and heads.
BY_PAIR = {"pair_bias", "mask_bias"}


class Operands(NamedTuple):
    """The tensors of a call, or their gradients; None for a missing one.

    Queries are stored last one first; see :mod:`~fairseq_posenc.backends.blocked.skew`.
    """

    query: Tensor  # `(B, H, T, D)`
    key: Tensor  # `(B, H, S, D)`
    value: Tensor  # shaped as the key; the gradients of both are `(B, H, D, S)`, the faster product
    first_token: Tensor | None = None  # index of the first token, `(B, H, 1, 1)`
    query_seeds: Tensor | None = None  # of dropout, two for each query, `(B, H, 2, T)`
    key_seeds: Tensor | None = None  # one for each key, `(B, H, S)`
    # `(G, R, D)`; with a reset, all tables have its two rows at their end
    query_table: Tensor | None = None
    key_table: Tensor | None = None  # `(G, R, D)`
    value_table: Tensor | None = None  # `(G, R, D)`
    # Where runs of distances share a row of a table, the row of each distance, `(1, R)` of int64.
    # `name_row_index` relies on the names
    query_row_index: Tensor | None = None
    key_row_index: Tensor | None = None
    value_row_index: Tensor | None = None
    state_table: Tensor | None = None  # `(G, R, W)`
    state_row_index: Tensor | None = None
    states: Tensor | None = None  # `(B, H, T, W)`
    gain: Tensor | None = None  # `(G, R)`
    bias: Tensor | None = None  # `(G, R)`
    distance_bias: Tensor | None = None  # FORBIDDEN where direction or window hide, `(1, R)`
    # the same of a window alone, `(1, R)`, if it leaves the keys visible that `first_keys` marks
    window_bias: Tensor | None = None
    first_keys: Tensor | None = None  # `(B, H, S)` of bool
    pair_bias: Tensor | None = None  # `(B or 1, G, T, S)`
    # FORBIDDEN for padding and forbidden pairs, else 0, `(B or 1, 1, T or 1, S)`
    mask_bias: Tensor | None = None
    # True for queries that may see no key, `(B or 1, 1, T, 1)`; not in reverse
    fully_masked: Tensor | None = None
    query_segments: Tensor | None = None  # `(B, H, T)`; a query sees keys of its segment
    key_segments: Tensor | None = None  # `(B, H, S)`
    temperature: Tensor | None = None  # multiplies all scores of a query, `(B, H, T)`
    sink: Tensor | None = None  # one more score in the softmax, `(B, H, 1)`
    # Decay is a running sum c over the tokens: c_i - c_j is added to the score of query i and key
    # j. The first two fields are for earlier keys, or for all keys if the next two are None
    query_decay: Tensor | None = None  # parts whose sum is c_i, `(B, H, T, parts)`
    key_decay: Tensor | None = None  # parts whose sum is c_j, `(B, H, S, parts)`
    query_later_decay: Tensor | None = None  # c_i for later keys, shaped as `query_decay`
    key_later_decay: Tensor | None = None  # c_j of later keys, shaped as `key_decay`
    # if all four are given, True at the distances of later keys, `(1, R)` of bool
    is_later: Tensor | None = None

    def select_chunk(self, chunk: Chunk) -> Operands:
        """Select a chunk's part of every field, as views ``(c, ...)``."""
        parts: dict[str, Any] = {}
        for name, x in self._asdict().items():
            if x is None:
                continue
            if name in BY_DISTANCE:
                parts[name] = x if x.size(0) == 1 else x[chunk.heads]
            elif name in BY_PAIR:
                sentences = chunk.sentences if x.size(0) > 1 else slice(None)
                parts[name] = x[sentences, chunk.heads if x.size(1) > 1 else slice(None)]
            elif name != "fully_masked":  # only used for all chunks together
                parts[name] = chunk.select(x)
        return self._replace(**parts)

    def make_zeros(self, needed: Sequence[bool]) -> Operands:
        """Make zeros for gradients: always for query, key and value, for other fields if needed.

        They are contiguous, so that a chunk is a view; those of ``zeros_like`` may not be.

        Args:
            needed: for each field, whether its gradient is needed.
        """
        zeros: dict[str, Any] = {
            name: x.new_zeros(x.shape) if is_needed else None
            for (name, x), is_needed in zip(self._asdict().items(), needed)
        }
        zeros["query"] = self.query.new_zeros(self.query.shape)
        zeros["key"] = self.key.new_zeros(self.key.mT.shape)
        zeros["value"] = self.value.new_zeros(self.value.mT.shape)
        return self._replace(**zeros)


def reverse_queries(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    return F.pad(x.flip(-2), missing) if any(missing) else x.flip(-2)


def name_row_index(table_name: str) -> str:
    """Name the field of :class:`Operands` with the row of each distance in a table."""
    return table_name.replace("table", "row_index")


def lay_out_terms(geometry: Geometry, terms: Terms, mask: Mask) -> dict[str, Tensor]:
    """Lay out the tables by distance, their row indices, and the terms of pairs and tokens."""
    operands = {}
    queries, keys = geometry.missing
    if terms.pair_bias is not None:
        operands["pair_bias"] = reverse_queries(at_least_fp32(terms.pair_bias), queries, keys)
    if terms.states is not None:
        operands["states"] = reverse_queries(at_least_fp32(terms.states), queries)
    if terms.first is not None:
        operands["first_token"] = find_first_tokens(terms.first, geometry.batch, geometry.heads)
    for name, term, table in terms.present():
        if term.rows is None:
            continue
        table = at_least_fp32(table).contiguous()
        runs = terms.runs.get(name)
        operands[name] = _pad_table(table, geometry) if runs is None else table
        if runs is not None:
            deps = (runs, geometry.padded, geometry.src_len, table.device)
            find = partial(_find_rows, runs, geometry, table.device)
            index_name = name_row_index(name)
            operands[index_name] = mask.cached(index_name, deps, find)
    return operands


def _pad_table(table: Tensor, geometry: Geometry) -> Tensor:
    """Pad a table ``(G, R, ...)`` to whole tiles, before the reset's rows; contiguous."""
    rows = geometry.tgt_len + geometry.src_len - 1
    missing = sum(geometry.missing)
    if not missing:
        return table
    blank = table.new_zeros(table.size(0), missing, *table.shape[2:])
    return torch.cat([table[:, :rows], blank, table[:, rows:]], dim=1)  # [G, R, ...]


def _find_rows(runs: Runs, geometry: Geometry, device: torch.device) -> Tensor:
    """Find the row of each distance, ``(1, R)``."""
    return runs.find(geometry.distances(device))


def build_distance_mask(geometry: Geometry, mask: Mask, device: torch.device) -> Tensor | None:
    """Build the mask of a direction and a window, ``(1, R)``: FORBIDDEN at hidden distances."""
    if mask.locality.first_keys is not None:
        mask = mask._replace(locality=Locality())
    if mask.direction == "both" and mask.locality.window is None:
        return None
    return _forbid(mask.mark_hidden(geometry.distances(device)))


def lay_out_window(geometry: Geometry, mask: Mask) -> dict[str, Tensor]:
    """Lay out a window that leaves some first keys visible, and those keys; {} without them."""
    first_keys = mask.locality.first_keys
    if first_keys is None:
        return {}
    hidden = mask.mark_hidden(geometry.distances(first_keys.device))  # [1, R]
    _, keys = _lay_out_tokens(geometry, first_keys[:, None, :, None])
    return {"window_bias": _forbid(hidden), "first_keys": keys[..., 0]}


def lay_out_segments(geometry: Geometry, mask: Mask) -> dict[str, Tensor]:
    """Lay out the segments of queries and keys; {} without segments."""
    segments = mask.locality.segments
    if segments is None:
        return {}
    queries, keys = _lay_out_tokens(geometry, segments[:, None, :, None])
    return {"query_segments": queries[..., 0], "key_segments": keys[..., 0]}


def lay_out_decay(geometry: Geometry, call: AttentionCall) -> dict[str, Tensor]:
    """Lay out the decay of queries and keys; {} without decay."""
    earlier, later = call.decay()
    operands = {}
    if earlier is not None:
        operands["query_decay"], operands["key_decay"] = _lay_out_tokens(geometry, earlier)
    if later is not None:
        operands["is_later"] = geometry.distances(later.device) > 0  # [1, R]
        queries, keys = _lay_out_tokens(geometry, later)
        operands["query_later_decay"], operands["key_later_decay"] = queries, keys
    return operands


def _lay_out_tokens(geometry: Geometry, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out ``(B or 1, G, S, n)`` as reversed queries ``(B, H, T, n)``, keys ``(B, H, S, n)``."""
    x = x.expand(geometry.batch, geometry.heads, -1, -1)  # [B, H, S, n]
    queries = reverse_queries(x[:, :, geometry.src_len - geometry.tgt_len :], geometry.missing[0])
    return queries, F.pad(x, (0, 0, 0, geometry.missing[1]))


def lay_out_softmax(geometry: Geometry, call: AttentionCall) -> dict[str, Tensor]:
    """Lay out temperatures, reversed as the queries, and sinks; {} without them."""
    operands = {}
    shape = (geometry.batch, geometry.heads, -1)
    if (temperature := call.temperature()) is not None:
        temperature = F.pad(at_least_fp32(temperature).flip(-1), (0, geometry.missing[0]))
        operands["temperature"] = temperature.expand(shape)
    if (sink := call.terms.sink) is not None:
        operands["sink"] = at_least_fp32(sink)[None, :, None].expand(shape)
    return operands


def build_mask_bias(mask: Mask, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Build the mask of padding and forbidden pairs, ``(B or 1, 1, T or 1, S)``."""
    queries, keys = geometry.missing
    padding_and_pairs = mask._replace(direction="both", locality=Locality())
    forbidden = padding_and_pairs.forbidden(geometry.tgt_len, geometry.src_len, device)
    if forbidden is None:
        if not keys:
            return None
        forbidden = torch.zeros(1, 1, 1, geometry.src_len, dtype=torch.bool, device=device)
    forbidden = F.pad(forbidden, (0, keys), value=True)  # [B or 1, 1, T or 1, S]
    return reverse_queries(_forbid(forbidden), queries if forbidden.size(2) > 1 else 0)


def find_fully_masked(mask: Mask, geometry: Geometry) -> Tensor | None:
    """Find the queries that see no key, ``(B or 1, 1, T, 1)``; None if all see one."""
    hiding = mask.pairs if mask.key_padding is None else mask.key_padding
    if hiding is None:
        return None  # direction, window and segments let a query see the key of its token
    counts = mask.count_visible(geometry.tgt_len, geometry.src_len, hiding.device)  # [B or 1, T]
    return counts.eq(0)[:, None, :, None]  # [B or 1, 1, T, 1]


def _forbid(forbidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: FORBIDDEN where it is True, else 0."""
    zeros = torch.zeros(forbidden.shape, dtype=torch.float32, device=forbidden.device)
    return zeros.masked_fill(forbidden, FORBIDDEN)
