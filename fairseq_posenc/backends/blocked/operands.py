"""Lays out the tensors of a call as blocks use them, all of one dtype.

Queries are stored last one first. B batch, H heads, T queries, S keys, R distances, G tables (H, or
1 for all heads), U distinct rows of a table, D head size, W width of a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block, find_near, list_distances
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask

# Added to the score of a hidden pair: below any score. Two of them may hide the same pair, and
# their sum is still finite in float32.
HIDDEN = -1e38


class Operands(NamedTuple):
    """The tensors of a call, or, after :meth:`select`, those of a block.

    Each field says its axes. A block takes its part of B, H, T, S, R, of n (near keys), r (their
    distances), b and a (keys before and after them), and all of D, W, U, N and 2. A table whose
    rows serve runs of distances has U rows in place of R, and an index.
    """

    query: Annotated[Tensor, "BHTD"]  # scaled
    key: Annotated[Tensor, "BHnD"]
    value: Annotated[Tensor, "BHSD"]
    # Their dot products are the scores of far keys: before the near ones, and after.
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
    # Of a reset: the first token's place, below 0 for none, its scores as the query of each key,
    # and those as the key of each query.
    first_at: Annotated[Tensor | None, "B"]
    first_query: Annotated[Tensor | None, "BH1S"]
    first_key: Annotated[Tensor | None, "BHT1"]
    pair_bias: Annotated[Tensor | None, "BHTS"]
    states: Annotated[Tensor | None, "BHTW"]
    temperature: Annotated[Tensor | None, "BHT1"]
    sink: Annotated[Tensor | None, "BH11"]
    query_decay: Annotated[Tensor | None, "BHTN"]  # c of the queries, in N parts
    key_decay: Annotated[Tensor | None, "BHSN"]
    later_query_decay: Annotated[Tensor | None, "BHTN"]  # for later keys, if they have another
    later_key_decay: Annotated[Tensor | None, "BHSN"]
    query_seeds: Annotated[Tensor | None, "BH2T"]  # of dropout, two for each query
    key_seeds: Annotated[Tensor | None, "BHS"]
    hidden: Annotated[Tensor | None, "HR"]  # HIDDEN where direction or window hide, else 0
    padding: Annotated[Tensor | None, "BHS"]  # HIDDEN for padding, else 0

    def select(self, block: Block, tensors: Iterable[Tensor | None]) -> Operands:
        """Select a block's part of these tensors, or of others of their shapes, as views."""

        def find_axes(name: str) -> str:
            shares = name.endswith("_rows") and getattr(self, f"{name[:-5]}_index") is not None
            return AXES[name].upper().replace("R", "U") if shares else AXES[name]  # U: whole

        selected = (
            None if x is None else block.select(x, find_axes(name))
            for name, x in zip(self._fields, tensors)
        )
        return Operands._make(selected)


AXES: dict[str, str] = {
    name: x.__metadata__[0] for name, x in get_type_hints(Operands, include_extras=True).items()
}


def lay_out(call: AttentionCall) -> Operands:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    device, terms, mask = call.query.device, call.terms, call.mask
    (batch, heads, tgt_len, head_dim), src_len = call.query.shape, call.key.size(2)
    distances = list_distances(tgt_len, src_len, device)
    scale = terms.scale(head_dim)
    # In a sum, the scale is in the queries and in the rows of keys; in a product, in one factor.
    scaled = terms.rows("key")
    if terms.product and scaled is None:
        scaled = terms.rows("query")
    query = _reverse(call.query)
    query = query if terms.product and scaled is not None else query * scale
    # Sentences and heads like one dimension, so that no product has to copy them.
    key, value = (
        at_least_fp32(x).reshape(-1, *x.shape[2:]).view(x.shape) for x in (call.key, call.value)
    )
    found: dict[str, Tensor | None] = dict.fromkeys(Operands._fields)
    found["query"], found["key"], found["value"] = query, key, value
    resets: dict[str, Tensor] = {}
    for name, term in find_tables(terms).items():
        rows = at_least_fp32(term.table)
        rows = rows * scale if term is scaled else rows
        if terms.first is not None:  # a reset: the last two rows, for the query and for the key
            rows, resets[name] = rows.split([rows.size(1) - 2, 2], 1)
        if term.runs is not None:
            found[name.replace("rows", "index")] = term.runs.find(distances)
        found[name] = rows.contiguous()
    if find_near(terms, src_len) is not None:
        for side, place in (("before", slice(1)), ("after", slice(-1, None))):  # the end rows
            rows_of_both = [found["query_rows"], found["key_rows"]]
            of_query, of_key = (None if x is None else x[:, place] for x in rows_of_both)
            found[f"{side}_query"], found[f"{side}_key"] = _fold_rows(
                query, key, of_query, of_key, terms.product
            )
    if (first := terms.first) is not None:  # [B or 1, S], True for the first token
        at = first.int().argmax(1)  # a tensor: reading it would wait for a GPU
        found["first_at"] = at.masked_fill(~first.any(1), -1)
        lines = _score_first(query, key, at.expand(batch), resets, terms.product)
        found["first_query"], found["first_key"] = lines
    if call.dropout:
        found["query_seeds"] = draw_seeds(batch, heads, 2, tgt_len, device=device)
        found["key_seeds"] = draw_seeds(batch, heads, src_len, device=device)
    if (by_pair := terms.find(NumbersByPair)) is not None:
        found["pair_bias"] = _reverse(by_pair.numbers)
    if (vectors := terms.find(States)) is not None:
        found["states"] = _reverse(vectors.vectors)
    if (factors := call.temperature()) is not None:
        found["temperature"] = _reverse(factors[..., None])
    if (score := terms.find(SinkScore)) is not None:
        found["sink"] = at_least_fp32(score.score)[None, :, None, None]
    for prefix, decay in zip(("", "later_"), call.decay()):  # c for earlier, and later keys
        if decay is not None:
            found[f"{prefix}query_decay"] = _reverse(decay[:, :, src_len - tgt_len :])
            found[f"{prefix}key_decay"] = decay
    if hides_by_distance_and_key(mask):
        if mask.direction != "both" or mask.window is not None:
            found["hidden"] = _hide(mask.mark_hidden(distances))[None]
        if mask.key_padding is not None:
            found["padding"] = _hide(mask.key_padding)[:, None]
    return Operands._make(found.values())


def find_tables(terms: Terms) -> dict[str, ByDistance]:
    """Find the tables by distance of the terms, by the field of :class:`Operands`."""
    tables: dict[str, ByDistance | None] = {
        **{f"{of}_rows": terms.rows(of) for of in ("query", "key", "state", "value")},
        **{"gain": terms.gain, "bias": terms.bias},
    }
    return {name: term for name, term in tables.items() if term is not None}


def hides_by_distance_and_key(mask: Mask) -> bool:
    """Check whether a mask is a row of distances and a row of keys for each sentence."""
    return mask.pairs is None and mask.segments is None and mask.first_keys is None


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
    numbers = None if key_row is None else _multiply(key, key_row)[..., None]  # k.K
    if product:
        query = query if query_row is None else query * _multiply(query, query_row)[..., None]
        return query, key if numbers is None else key * numbers
    key = key if query_row is None else key + query_row
    if numbers is None:
        return query, key
    return F.pad(query, (0, 1), value=1.0), torch.cat([key, numbers], -1)


def _score_first(
    query: Tensor, key: Tensor, at: Tensor, resets: dict[str, Tensor], product: bool
) -> tuple[Tensor, Tensor]:
    """Score the pairs of first tokens: as a query, ``(B, H, 1, S)``, as a key, ``(B, H, T, 1)``.

    Args:
        query: ``(B, H, T, D)``, the last one first.
        key: ``(B, H, S, D)``.
        at: the first token's place among the keys, ``(B,)``; it need not be one of the queries.
        resets: of each table by its field, the row for the query and that for the key.
        product: whether the terms are multiplied, not added.
    """
    sentences = torch.arange(len(at), device=at.device)
    query_at = (key.size(2) - 1 - at).clamp(max=query.size(2) - 1)
    pairs = (query[sentences, :, query_at, None], key), (query, key[sentences, :, at, None])
    lines = []
    for index, (queries, keys) in enumerate(pairs):
        row = {name: rows[:, index, None] for name, rows in resets.items()}  # [G, 1, D] or [G, 1]
        products = [
            _multiply(tokens, row[name])
            for name, tokens in (("query_rows", queries), ("key_rows", keys))
            if name in row
        ]
        lines.append(
            equation.score(
                _multiply(queries, keys),
                products,
                product=product,
                gain=row.get("gain"),
                biases=[row["bias"]] if "bias" in row else [],
            )
        )
    of_query, of_key = lines
    return of_query[:, :, None], of_key[..., None]


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply vectors; not by a matrix product, whose gradient autocast would round."""
    return (x * y).sum(-1)


def _hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _reverse(x: Tensor) -> Tensor:
    """Reverse the queries of ``(..., T, n)``."""
    return at_least_fp32(x).flip(-2)
