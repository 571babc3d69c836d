"""Computes the reset of the first token around the kernels, which have no reset.

A reset gives the pairs of one token with all others two table rows of their own. Its row and its
column of the scores are each computed by the reference like a step of decoding, in time linear in
the length. The kernels leave out the first token's key, which then joins their sums as a last block
of keys would; the row of its query replaces theirs.

B batch, H heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms

Kernels = Callable[[AttentionCall], tuple[Tensor, Tensor]]  # see `ForwardResult`


def attend(kernels: Kernels, call: AttentionCall) -> Tensor:
    """Compute the attended values ``(B, H, T, D)`` of a call with a reset.

    The kernels compute attention without one: values in float32, and log2 of the sums.
    """
    query, key, value, terms, mask, dropout, _ = call
    tgt_len, src_len = query.size(2), key.size(2)
    assert terms.first is not None
    first = terms.first.expand(query.size(0), -1)  # [B, S]
    deps = (terms.first, *mask.cache_deps, query.size(0), tgt_len)
    places = mask.cached("reset", deps, lambda: _Places.locate(first, mask, tgt_len))
    place = places.first
    kernel_terms, row_terms, column_terms = _split_terms(terms, tgt_len, src_len)
    left_out = mask._replace(key_padding=places.left_out)
    attended, log_sums = kernels(call._replace(terms=kernel_terms, mask=left_out))
    scores = reference.scores(_select_token(key, place), query, column_terms)  # [B, H, 1, T]
    scores = scores.transpose(2, 3)  # [B, H, T, 1]
    # As a last block with a single key joins the online softmax.
    weights = torch.sigmoid(scores - math.log(2) * log_sums.unsqueeze(3))
    weights = weights.masked_fill(places.hidden_key[:, None, :, None], 0.0)
    last = _select_token(value, place).float()  # [B, H, 1, D]
    if column_terms.value_table is not None:
        last = last + column_terms.value_table[:, :1].float()
    attended = attended * (1 - weights) + F.dropout(weights, dropout) * last
    row_mask = Mask("both", places.hidden_of_query)
    row_query = _select_token(query, places.query)
    row, _ = reference.attend(call._replace(query=row_query, terms=row_terms, mask=row_mask))
    is_query = first[:, None, src_len - tgt_len :, None]  # [B, 1, T, 1]
    return torch.where(is_query, row, attended).type_as(value)


class _Places(NamedTuple):
    """Places of the first tokens, and their masks."""

    first: Tensor  # position of the first token in each row, `(B,)`; 0 without one
    query: Tensor  # the same among the queries
    left_out: Tensor  # keys that the kernels leave out, `(B, S)`
    hidden_key: Tensor  # queries that must not see the first token's key, or have none, `(B, T)`
    hidden_of_query: Tensor  # keys that the first token's query must not see, `(B, S)`

    @classmethod
    def locate(cls, first: Tensor, mask: Mask, tgt_len: int) -> _Places:
        """Locate the first tokens, given ``(B, S)``, True at each."""
        src_len = first.size(1)
        place = first.int().argmax(1)  # [B]
        query = (place - (src_len - tgt_len)).clamp(0)
        left_out = first if mask.key_padding is None else first | mask.key_padding
        hidden_key = _find_hidden_key(first, place, mask, tgt_len)
        return cls(
            place, query, left_out, hidden_key, _find_hidden_of_query(place, query, mask, src_len)
        )


def _split_terms(terms: Terms, tgt_len: int, src_len: int) -> tuple[Terms, Terms, Terms]:
    """Split terms into those of the kernels, of the first token's row, and of its column.

    The column's are for its key in the role of a query, and queries in that of keys.
    """
    bare = terms._replace(first=None)
    sizes = [tgt_len + src_len - 1, 1, 1]
    lines = {name: table.split(sizes, 1) for name, _, table in terms.present()}

    def select_row(row: int, length: int) -> dict[str, Any]:
        tables = {name: parts[row] for name, parts in lines.items()}
        return {name: x.expand(-1, length, *x.shape[2:]) for name, x in tables.items()}

    column = bare._replace(**select_row(2, tgt_len))
    return (
        bare._replace(**{name: parts[0] for name, parts in lines.items()}),
        bare._replace(**select_row(1, src_len)),
        column._replace(query_table=column.key_table, key_table=column.query_table),
    )


def _select_token(x: Tensor, at: Tensor) -> Tensor:
    """Select one token of ``(B, H, n, D)`` at ``(B,)``: ``(B, H, 1, D)``."""
    return x.gather(2, at[:, None, None, None].expand(-1, x.size(1), 1, x.size(3)))


def _find_hidden_key(first: Tensor, place: Tensor, mask: Mask, tgt_len: int) -> Tensor:
    """Mark the queries that must not see the first token's key, or have none, ``(B, T)``."""
    hidden = ~first.any(1, keepdim=True)
    if mask.key_padding is not None:
        hidden = hidden | mask.key_padding.gather(1, place[:, None])
    queries = torch.arange(first.size(1) - tgt_len, first.size(1), device=first.device)
    hidden = hidden | mask.mark_hidden(place[:, None] - queries)
    if mask.pairs is not None:
        hidden = hidden | mask.pairs[:, place].T
    return hidden.expand(-1, tgt_len)


def _find_hidden_of_query(place: Tensor, at: Tensor, mask: Mask, src_len: int) -> Tensor:
    """Mark the keys that the first token's query must not see, ``(B, S)``."""
    hidden = mask.key_padding
    if hidden is None:
        hidden = torch.zeros(place.size(0), src_len, dtype=torch.bool, device=place.device)
    keys = torch.arange(src_len, device=place.device)
    hidden = hidden | mask.mark_hidden(keys - place[:, None])
    if mask.pairs is not None:
        hidden = hidden | mask.pairs[at]
    return hidden
