"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Queries are stored last one first. B batch, H heads, T queries, S keys, R distances, G tables (H, or
1 for all heads), U distinct rows of a table, D head size, W width of a state.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block, Geometry
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States
from fairseq_posenc.encodings.terms import Terms

# Added to the score of a hidden pair: below any score. Two of them may hide the same pair, and
# their sum is still finite in float32.
HIDDEN = -1e38


class Operands(NamedTuple):
    """The tensors of a call, or, after :meth:`select`, those of a block.

    Each field says its axes: see :meth:`Block.select`, and D, W, U, N, 2 for all. A table whose
    rows serve runs of distances has U rows in place of R. The two rows of a reset are for pairs of
    a first token as the query, and as the key of another query.
    """

    query: Annotated[Tensor, "BHTD"]  # scaled
    key: Annotated[Tensor, "BHnD"]
    value: Annotated[Tensor, "BHSD"]
    # Their dot products are the scores of far keys: before the near ones, and after; `fold_rows`.
    before_query: Annotated[Tensor | None, "BHTD"]
    before_key: Annotated[Tensor | None, "BHbD"]
    after_query: Annotated[Tensor | None, "BHTD"]
    after_key: Annotated[Tensor | None, "BHaD"]
    query_rows: Annotated[Tensor | None, "HrD"]
    query_index: Annotated[Tensor | None, "r"]  # which of U rows each distance has
    key_rows: Annotated[Tensor | None, "HrD"]
    key_index: Annotated[Tensor | None, "r"]
    state_rows: Annotated[Tensor | None, "HRW"]
    state_index: Annotated[Tensor | None, "R"]
    value_rows: Annotated[Tensor | None, "HRD"]
    value_index: Annotated[Tensor | None, "R"]
    gain: Annotated[Tensor | None, "HR"]
    bias: Annotated[Tensor | None, "HR"]
    query_reset: Annotated[Tensor | None, "H2D"]
    key_reset: Annotated[Tensor | None, "H2D"]
    gain_reset: Annotated[Tensor | None, "H2"]
    bias_reset: Annotated[Tensor | None, "H2"]
    first_at: Annotated[Tensor | None, "B"]  # the first token of a reset; below 0 for none
    pair_bias: Annotated[Tensor | None, "BHTS"]
    states: Annotated[Tensor | None, "BHTW"]
    temperature: Annotated[Tensor | None, "BHT"]
    sink: Annotated[Tensor | None, "BH1"]
    query_decay: Annotated[Tensor | None, "BHTN"]  # c of the queries, in N parts
    key_decay: Annotated[Tensor | None, "BHSN"]
    later_query_decay: Annotated[Tensor | None, "BHTN"]  # for later keys, if they have another
    later_key_decay: Annotated[Tensor | None, "BHSN"]
    query_seeds: Annotated[Tensor | None, "BH2T"]  # of dropout, two for each query
    key_seeds: Annotated[Tensor | None, "BHS"]
    hidden: Annotated[Tensor | None, "HR"]  # HIDDEN where direction or window hide, else 0
    padding: Annotated[Tensor | None, "BHS"]  # HIDDEN for padding, else 0

    def select(self, block: Block, shared: Collection[str]) -> Operands:
        """Select the part of each tensor that a block needs, as views.

        Args:
            block: the places.
            shared: the fields of tables that have U rows.
        """

        def select(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            axes = re.sub("[rR]", "U", AXES[name]) if name in shared else AXES[name]
            return block.select(x, axes)

        return Operands._make(map(select, self._fields, self))


AXES: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Operands, None, None, True).items()
}


def lay_out(call: AttentionCall, geometry: Geometry) -> Operands:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    missing_queries, missing_keys = geometry.missing
    device, terms, mask = call.query.device, call.terms, call.mask
    scale = terms.scale(call.query.size(-1))
    # In a sum, the scale is in the queries and in the rows of keys; in a product, in one factor.
    scaled = terms.rows("key")
    if terms.product and scaled is None:
        scaled = terms.rows("query")
    query = _reverse(call.query, missing_queries)
    query = query if terms.product and scaled is not None else query * scale

    def fill_tiles(x: Tensor) -> Tensor:
        x = F.pad(at_least_fp32(x), (0, 0, 0, missing_keys)) if missing_keys else at_least_fp32(x)
        # Sentences and heads like one dimension, so that no product has to copy them.
        return x.reshape(-1, *x.shape[2:]).view(x.shape)

    found: dict[str, Tensor | None] = dict.fromkeys(Operands._fields)
    key = fill_tiles(call.key)
    found["query"], found["key"], found["value"] = query, key, fill_tiles(call.value)
    for name, term in find_tables(terms).items():
        rows = at_least_fp32(term.table)
        rows = rows * scale if term is scaled else rows
        if terms.first is not None:
            rows, reset = rows.split([rows.size(1) - 2, 2], 1)
            found[f"{name.removesuffix('_rows')}_reset"] = reset
        if term.runs is None:  # in dimension 1, rows for the distances of padded tokens
            rows = F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing_queries + missing_keys))
        else:
            index = term.runs.find(geometry.distances(device))
            found[name.replace("rows", "index")] = index
        found[name] = rows.contiguous()
    if geometry.near is not None:
        for side, place in (("before", slice(1)), ("after", slice(-1, None))):
            rows_of_both = [found["query_rows"], found["key_rows"]]
            of_query, of_key = (None if x is None else x[:, place] for x in rows_of_both)
            found[f"{side}_query"], found[f"{side}_key"] = _fold_rows(
                query, key, of_query, of_key, terms.product
            )
    if call.dropout:
        shape, (tgt_len, src_len) = (geometry.batch, geometry.heads), geometry.padded
        found["query_seeds"] = draw_seeds(*shape, 2, tgt_len, device=device)
        found["key_seeds"] = draw_seeds(*shape, src_len, device=device)
    if (first := terms.first) is not None:
        at = first.int().argmax(1)  # a tensor: reading it would wait for a GPU
        found["first_at"] = at.masked_fill(~first.any(1), -geometry.padded[1] - 1)  # no place
    if (by_pair := terms.find(NumbersByPair)) is not None:
        found["pair_bias"] = _reverse(by_pair.numbers, missing_queries, missing_keys)
    if (vectors := terms.find(States)) is not None:
        found["states"] = _reverse(vectors.vectors, missing_queries)
    if (factors := call.temperature()) is not None:
        found["temperature"] = _reverse(factors[..., None], missing_queries).squeeze(-1)
    if (score := terms.find(SinkScore)) is not None:
        found["sink"] = at_least_fp32(score.score)[None, :, None]
    for prefix, decay in zip(("", "later_"), call.decay()):
        if decay is not None:
            of_queries = decay[:, :, geometry.src_len - geometry.tgt_len :]
            found[f"{prefix}query_decay"] = _reverse(of_queries, missing_queries)
            found[f"{prefix}key_decay"] = F.pad(decay, (0, 0, 0, missing_keys))
    # A window with first keys, which it does not hide, is not laid out by distance.
    by_distance = mask.direction != "both" or mask.locality.window is not None
    if by_distance and mask.locality.first_keys is None:
        found["hidden"] = _hide(mask.mark_hidden(geometry.distances(device)))[None]
    if mask.key_padding is not None or missing_keys:
        padding = mask.key_padding
        if padding is None:
            padding = torch.zeros(1, geometry.src_len, dtype=torch.bool, device=device)
        found["padding"] = _hide(F.pad(padding, (0, missing_keys), value=True))[:, None]
    return Operands._make(found.values())


def find_tables(terms: Terms) -> dict[str, ByDistance]:
    """Find the tables by distance of the terms, by the field of :class:`Operands`."""
    tables: dict[str, ByDistance | None] = {
        **{f"{of}_rows": terms.rows(of) for of in ("query", "key", "state", "value")},
        **{"gain": terms.gain, "bias": terms.bias},
    }
    return {name: term for name, term in tables.items() if term is not None}


def _fold_rows(
    query: Tensor, key: Tensor, query_row: Tensor | None, key_row: Tensor | None, product: bool
) -> tuple[Tensor, Tensor]:
    """Make vectors whose dot products are the scores of pairs that share a row of each table.

    The product (q.Q) (k.K) (q.k) is the dot product of (q.Q) q and (k.K) k. The sum q.k + q.Q + k.K
    is that of q and k + Q, with one more channel for the last summand: [q, 1] and [k + Q, k.K].

    Args:
        query: ``(B, H, T, D)``.
        key: ``(B, H, S, D)``.
        query_row: Q, ``(G, 1, D)``; None for no such term.
        key_row: K.
        product: whether the terms are multiplied, not added.
    """
    numbers = None if key_row is None else key @ key_row.mT  # k.K, [B, H, S, 1]
    if product:
        query = query if query_row is None else query * (query @ query_row.mT)
        return query, key if numbers is None else key * numbers
    key = key if query_row is None else key + query_row
    if numbers is None:
        return query, key
    return F.pad(query, (0, 1), value=1.0), torch.cat([key, numbers], -1)


def find_uncommon(mask: Mask) -> Mask | None:
    """Find the part of a mask that is not laid out: segments, first keys and forbidden pairs."""
    locality = mask.locality
    if locality.first_keys is not None:
        return mask._replace(key_padding=None, cache=None)
    if locality.segments is None and mask.pairs is None:
        return None
    return Mask(pairs=mask.pairs, locality=Locality(segments=locality.segments))


def _hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _reverse(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    x = at_least_fp32(x).flip(-2)
    return F.pad(x, missing) if any(missing) else x
