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
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms

# Added to the score of a forbidden pair: exceeds any score. A pair may be forbidden by distance,
# segment and mask, and the sum of three is still finite.
FORBIDDEN = -1e38
# Fields `(G, R, ...)`, cut by head alone.
BY_DISTANCE = {
    "query_table",
    "key_table",
    "value_table",
    "state_table",
    "query_places",
    "key_places",
    "value_places",
    "state_places",
    "gain",
    "bias",
    "distance_bias",
    "window_bias",
    "is_later",
}
# Fields `(B or 1, G, ...)`.
BY_PAIR = {"pair_bias", "masked"}


class Operands(NamedTuple):
    """The tensors of a call, or their gradients; None for a missing one.

    Queries are stored last one first; see :mod:`~fairseq_posenc.backends.blocked.skew`.
    """

    query: Tensor  # `(B, H, T, D)`
    key: Tensor  # `(B, H, S, D)`; its gradient is `(B, H, D, S)`, the faster product
    value: Tensor  # shaped as the key
    first: Tensor | None = None  # place of the first token, `(B, H, 1, 1)`
    # dropout mixes two seeds of each query with one of each key, `(B, H, 2, T)`
    query_seeds: Tensor | None = None
    key_seeds: Tensor | None = None  # `(B, H, S)`
    # `(G, R, D)`; with a reset, all tables have its two rows at their end
    query_table: Tensor | None = None
    key_table: Tensor | None = None  # `(G, R, D)`
    value_table: Tensor | None = None  # `(G, R, D)`
    # where rows of a table serve runs of distances, the row of each distance, `(1, R)` of int64
    query_places: Tensor | None = None
    key_places: Tensor | None = None
    value_places: Tensor | None = None
    state_table: Tensor | None = None  # `(G, R, W)`
    state_places: Tensor | None = None
    states: Tensor | None = None  # `(B, H, T, W)`
    gain: Tensor | None = None  # `(G, R)`
    bias: Tensor | None = None  # `(G, R)`
    distance_bias: Tensor | None = None  # -1e38 where direction or window hide, `(1, R)`
    # the same of a window that leaves the first keys visible, and where these are, `(B, H, S)`
    window_bias: Tensor | None = None
    first_keys: Tensor | None = None
    pair_bias: Tensor | None = None  # `(B or 1, G, T, S)`
    # the bias of padding and forbidden pairs, `(B or 1, 1, T or 1, S)`
    masked: Tensor | None = None
    # True for queries that may see no key, `(B or 1, 1, T, 1)`, first query first
    fully_masked: Tensor | None = None
    query_segments: Tensor | None = None  # `(B, H, T)`; a query sees keys of its segment
    key_segments: Tensor | None = None  # `(B, H, S)`
    temperature: Tensor | None = None  # multiplies all scores of a query, `(B, H, T)`
    sink: Tensor | None = None  # one more score in the softmax, `(B, H, 1)`
    # Decay is a running sum c over the tokens: c_i - c_j is added to the score of query i and key
    # j. These two serve earlier keys or, unless the next two are given, all keys
    query_decay: Tensor | None = None  # parts whose sum is c_i, `(B, H, T, parts)`
    key_decay: Tensor | None = None  # parts whose sum is c_j, `(B, H, S, parts)`
    query_later: Tensor | None = None  # c_i for later keys, shaped as `query_decay`
    key_later: Tensor | None = None  # c_j of later keys, shaped as `key_decay`
    # where both kinds are given, True at the distances of later keys, `(1, R)` of bool
    is_later: Tensor | None = None

    def select_chunk(self, chunk: Chunk) -> Operands:
        """Select a chunk's part of every field, as views ``(c, ...)``."""
        parts: dict[str, Any] = {}
        for name, x in self._asdict().items():
            if x is None or name in BY_DISTANCE:
                parts[name] = x if x is None or x.size(0) == 1 else x[chunk.heads]
            elif name in BY_PAIR:
                sizes = zip(chunk, x.shape)
                parts[name] = x[tuple(part if size > 1 else slice(None) for part, size in sizes)]
            elif name != "fully_masked":  # used on all attended values, never within a chunk
                parts[name] = chunk.select(x)
        return self._replace(**parts)

    def make_zeros(self, wanted: Sequence[bool]) -> Operands:
        """Make zeros for the wanted gradients, and for those of query, key and value.

        Args:
            wanted: for each field, whether its gradient is needed.
        """
        zeros: dict[str, Any] = {
            name: torch.zeros_like(x) if wants else None
            for (name, x), wants in zip(self._asdict().items(), wanted)
        }
        query, key, value = self[:3]
        zeros["query"] = query.new_zeros(query.shape)  # contiguous, unlike those of `zeros_like`
        zeros["key"] = key.new_zeros(key.mT.shape)
        zeros["value"] = value.new_zeros(value.mT.shape)
        return self._replace(**zeros)


def reverse_queries(x: Tensor, queries: int, keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros to queries and keys."""
    x = x.flip(-2)  # [..., T, n]
    return F.pad(x, (0, keys, 0, queries)) if queries or keys else x


def lay_out_tables(geometry: Geometry, terms: Terms, mask: Mask) -> dict[str, Tensor]:
    """Lay out all tables by distance, contiguous, and the places of distances in them."""
    operands = {}
    for name, term, table in terms.present():
        if term.rows is None:
            continue
        table = at_least_fp32(table).contiguous()
        operands[name] = table
        if (runs := terms.runs.get(name)) is None:
            operands[name] = _pad_table(table, geometry)
        else:
            deps = (runs, geometry.padded, geometry.src_len, table.device)
            find = partial(_find_places, runs, geometry, table.device)
            key = name.replace("table", "places")
            operands[key] = mask.cached(key, deps, find)
    return operands


def _pad_table(table: Tensor, geometry: Geometry) -> Tensor:
    """Pad a table ``(G, R, ...)`` to whole tiles, before the reset's rows; contiguous."""
    rows = geometry.tgt_len + geometry.src_len - 1
    missing = sum(geometry.missing)
    if not missing:
        return table
    blank = table.new_zeros(table.size(0), missing, *table.shape[2:])
    return torch.cat([table[:, :rows], blank, table[:, rows:]], dim=1)  # [G, R, ...]


def _find_places(runs: Runs, geometry: Geometry, device: torch.device) -> Tensor:
    """Find the row of each distance, ``(1, R)``."""
    return runs.find(geometry.distances(device))


def build_distance_mask(geometry: Geometry, mask: Mask, device: torch.device) -> Tensor | None:
    """Build the mask of a direction and a window, ``(1, R)``: -1e38 at hidden distances."""
    if mask.locality.first_keys is not None:
        mask = mask._replace(locality=Locality())
    if mask.direction == "both" and mask.locality.window is None:
        return None
    return _forbid(mask.mark_hidden(geometry.distances(device)))


def lay_out_window(geometry: Geometry, mask: Mask) -> dict[str, Tensor]:
    """Lay out a window that leaves the first keys visible, and these; {} without them."""
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
    if earlier is not None and later is not None:
        operands["is_later"] = geometry.distances(earlier.device) > 0  # [1, R]
        operands["query_later"], operands["key_later"] = _lay_out_tokens(geometry, later)
    if (earlier_or_all := later if earlier is None else earlier) is not None:
        operands["query_decay"], operands["key_decay"] = _lay_out_tokens(geometry, earlier_or_all)
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
    sizes, (queries, keys) = (geometry.tgt_len, geometry.src_len), geometry.missing
    forbidden = mask._replace(direction="both", locality=Locality()).forbidden(*sizes, device)
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
        return None  # the diagonal is never masked
    counts = mask.count_visible(geometry.tgt_len, geometry.src_len, hiding.device)  # [B or 1, T]
    return counts.eq(0)[:, None, :, None]  # [B or 1, 1, T, 1]


def _forbid(forbidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: FORBIDDEN where it is True, else 0."""
    zeros = torch.zeros(forbidden.shape, dtype=torch.float32, device=forbidden.device)
    return zeros.masked_fill(forbidden, FORBIDDEN)
