"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Queries are stored last one first. The letters of shapes are those of ``geometry.py``; G is H, or 1
for what all heads share, R distances, U distinct rows of a table, D head size, W width of a state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Geometry, Part
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States

# Added to the score of a hidden pair: below any score. Two of them may hide the same pair, and
# their sum is still finite in float32.
HIDDEN = -1e38


@dataclass(frozen=True)
class RowTable:
    """A table by distance; distances are counted from the call's lowest one.

    With the rows 5 6 7 for distances up to 1, of 2, and from 3 on, ``starts`` is 2 3 and ``index``,
    for six distances, 0 0 1 2 2 2.
    """

    rows: Tensor  # (G, R, D), or numbers (G, R); or distinct rows, (G, U, D)
    starts: Sequence[int] = ()  # of distinct rows, the first distance of each row but the first
    index: Tensor | None = None  # the distinct row of each distance, (R,)
    # Two more rows, for the pairs of a first token as the query, and as the key of another query.
    reset: Tensor | None = None  # (G, 2, D) or (G, 2)

    def find_rows(self, part: Part) -> slice:
        """Find the distinct rows that a part needs."""
        distances = part.distances
        last = bisect_right(self.starts, distances.stop - 1)
        return slice(bisect_right(self.starts, distances.start), last + 1)


@dataclass(frozen=True)
class Operands:
    """The tensors of a call."""

    query: Tensor  # (B, H, T, D), scaled
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, D)
    query_rows: RowTable | None = None
    key_rows: RowTable | None = None
    value_rows: RowTable | None = None
    state_rows: RowTable | None = None
    gain: RowTable | None = None
    bias: RowTable | None = None
    pair_bias: Tensor | None = None  # (B, H, T, S)
    states: Tensor | None = None  # (B, H, T, W)
    temperature: Tensor | None = None  # (B, H, T)
    sink: Tensor | None = None  # (1, H, 1)
    # Of earlier and of later keys, c of queries (B, H, T, parts) and of keys (B, H, S, parts).
    decay: tuple[Tensor, Tensor] | None = None
    later_decay: tuple[Tensor, Tensor] | None = None
    seeds: tuple[Tensor, Tensor] | None = None  # of dropout, (B, H, 2, T) and (B, H, S)
    first_at: Tensor | None = None  # (B,), the first token of a reset; below 0 for none
    hidden: Tensor | None = None  # (1, R), HIDDEN where direction or window hide, else 0
    padding: Tensor | None = None  # (B, 1, S), HIDDEN for padding, else 0


def map_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change each tensor of a dataclass or tuple, and of those in it."""
    if isinstance(record, Tensor):
        return change(record)
    if isinstance(record, tuple):
        return tuple(map_tensors(x, change) for x in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    values = {x.name: map_tensors(getattr(record, x.name), change) for x in fields(record)}
    return replace(record, **values)


def lay_out(call: AttentionCall, geometry: Geometry) -> Operands:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    missing_queries, missing_keys = geometry.missing
    device, terms = call.query.device, call.terms
    scale = terms.scale(call.query.size(-1))
    # Scaled queries scale the sum of terms but the products of keys; a product is scaled once.
    scaled = terms.rows("key")
    if terms.product and scaled is None:
        scaled = terms.rows("query")
    query = _reverse(call.query, missing_queries)
    query = query if terms.product and scaled is not None else query * scale

    def fill_tiles(x: Tensor) -> Tensor:
        x = F.pad(at_least_fp32(x), (0, 0, 0, missing_keys)) if missing_keys else at_least_fp32(x)
        # Sentences and heads like one dimension, so that no product has to copy them.
        return x.reshape(-1, *x.shape[2:]).view(x.shape)

    def lay_out_table(term: ByDistance | None) -> RowTable | None:
        if term is None:
            return None
        rows, reset = at_least_fp32(term.table), None
        rows = rows * scale if term is scaled else rows
        if terms.first is not None:
            rows, reset = rows.split([rows.size(1) - 2, 2], 1)
        if term.runs is None:
            blank = (0, 0) * (rows.dim() - 2) + (0, missing_queries + missing_keys)
            return RowTable(F.pad(rows, blank).contiguous(), reset=reset)
        starts = [start + geometry.src_len - 1 for start in term.runs.starts]
        index = term.runs.find(geometry.distances(device))
        return RowTable(rows.contiguous(), starts, index, reset)

    def split_sides(decay: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if decay is None:
            return None
        of_queries = decay[:, :, geometry.src_len - geometry.tgt_len :]
        return _reverse(of_queries, missing_queries), F.pad(decay, (0, 0, 0, missing_keys))

    seeds = first_at = None
    if call.dropout:
        shape, (tgt_len, src_len) = (geometry.batch, geometry.heads), geometry.padded
        of_queries = draw_seeds(*shape, 2, tgt_len, device=device)
        seeds = of_queries, draw_seeds(*shape, src_len, device=device)
    if (first := terms.first) is not None:
        found = first.int().argmax(1)  # a tensor: reading it would wait for a GPU
        first_at = found.masked_fill(~first.any(1), -geometry.padded[1] - 1)
    pair_bias = states = temperature = sink = None
    if (by_pair := terms.find(NumbersByPair)) is not None:
        pair_bias = _reverse(by_pair.numbers, missing_queries, missing_keys)
    if (vectors := terms.find(States)) is not None:
        states = _reverse(vectors.vectors, missing_queries)
    if (factors := call.temperature()) is not None:
        temperature = _reverse(factors[..., None], missing_queries).squeeze(-1)
    if (score := terms.find(SinkScore)) is not None:
        sink = at_least_fp32(score.score)[None, :, None]
    earlier, later = call.decay()
    return Operands(
        query,
        fill_tiles(call.key),
        fill_tiles(call.value),
        query_rows=lay_out_table(terms.rows("query")),
        key_rows=lay_out_table(terms.rows("key")),
        value_rows=lay_out_table(terms.rows("value")),
        state_rows=lay_out_table(terms.rows("state")),
        gain=lay_out_table(terms.gain),
        bias=lay_out_table(terms.bias),
        pair_bias=pair_bias,
        states=states,
        temperature=temperature,
        sink=sink,
        decay=split_sides(earlier),
        later_decay=split_sides(later),
        seeds=seeds,
        first_at=first_at,
        hidden=_hide_distances(call.mask, geometry, device),
        padding=_hide_padding(call.mask, geometry, device),
    )


def find_uncommon(mask: Mask) -> Mask | None:
    """Find the part of a mask that is not laid out: segments, first keys and forbidden pairs.

    Returns:
        A mask to be called for the pairs of each block, or None if there is nothing of the kind.
    """
    locality = mask.locality
    if locality.first_keys is not None:  # a window that does not hide them is not laid out, either
        return mask._replace(key_padding=None, cache=None)
    if locality.segments is None and mask.pairs is None:
        return None
    return Mask(pairs=mask.pairs, locality=Locality(segments=locality.segments))


def _hide_distances(mask: Mask, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Lay out direction and window, ``(1, R)``; a window with first keys is not laid out."""
    limits = mask.locality
    if limits.first_keys is not None or (mask.direction == "both" and limits.window is None):
        return None
    return hide(mask.mark_hidden(geometry.distances(device)))[None]


def _hide_padding(mask: Mask, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Lay out padding, and the keys that fill the last tile, ``(B or 1, 1, S)``."""
    padding, missing_keys = mask.key_padding, geometry.missing[1]
    if padding is None and not missing_keys:
        return None
    if padding is None:
        padding = torch.zeros(1, geometry.src_len, dtype=torch.bool, device=device)
    return hide(F.pad(padding, (0, missing_keys), value=True))[:, None]


def hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _reverse(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    x = at_least_fp32(x).flip(-2)
    return F.pad(x, missing) if any(missing) else x
