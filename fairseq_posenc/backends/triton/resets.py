"""Computes the reset of the first token around the kernels, which have no reset.

A reset gives the pairs of the first token two table rows of their own, one where it is the query,
one where it is the key. The reference computes its row and its column of the scores, each like a
step of decoding, in time linear in the length. The kernels leave out the first token's key, which
then joins their sums as a last block of keys would; the row of its query replaces theirs.

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

    Args:
        kernels: computes a call without one: values in float32, and log2 of the sums.
        call: with a reset.
    """
    query, key, value, terms, mask, dropout, _ = call
    tgt_len, src_len = query.size(2), key.size(2)
    assert terms.first is not None
    first = terms.first.expand(query.size(0), -1)  # [B, S]
    deps = (terms.first, *mask.cache_deps, query.size(0), tgt_len)
    tokens = mask.cached("reset", deps, lambda: _FirstTokens.locate(first, mask, tgt_len))
    kernel_terms, row_terms, column_terms = _split_terms(terms, tgt_len, src_len)
    kernel_mask = mask._replace(key_padding=tokens.left_out)
    attended, log_sums = kernels(call._replace(terms=kernel_terms, mask=kernel_mask))
    first_key = _select_token(key, tokens.key_index)
    scores = reference.scores(first_key, query, column_terms)  # [B, H, 1, T]
    scores = scores.transpose(2, 3)  # [B, H, T, 1]
    # As a last block with a single key joins the online softmax.
    weights = torch.sigmoid(scores - math.log(2) * log_sums.unsqueeze(3))
    weights = weights.masked_fill(tokens.hidden_key[:, None, :, None], 0.0)
    first_value = _select_token(value, tokens.key_index).float()  # [B, H, 1, D]
    if column_terms.value_table is not None:
        first_value = first_value + column_terms.value_table[:, :1].float()
    attended = attended * (1 - weights) + F.dropout(weights, dropout) * first_value
    row_mask = Mask(key_padding=tokens.hidden_of_query)
    row_query = _select_token(query, tokens.query_index)
    row, _ = reference.attend(call._replace(query=row_query, terms=row_terms, mask=row_mask))
    is_query = first[:, None, src_len - tgt_len :, None]  # [B, 1, T, 1]
    return torch.where(is_query, row, attended).type_as(value)


class _FirstTokens(NamedTuple):
    """The indices of the first tokens, and their masks."""

    key_index: Tensor  # index of the first token of each sentence, `(B,)`; 0 without one
    query_index: Tensor  # the same among the queries; 0 if it is none of them
    left_out: Tensor  # keys that the kernels leave out, `(B, S)`
    hidden_key: Tensor  # queries that must not see the first token's key, or have none, `(B, T)`
    hidden_of_query: Tensor  # keys that the first token's query must not see, `(B, S)`

    @classmethod
    def locate(cls, first: Tensor, mask: Mask, tgt_len: int) -> _FirstTokens:
        """Locate the first tokens, given ``(B, S)``, True at each."""
        src_len = first.size(1)
        key_index = first.int().argmax(1)  # [B]
        query_index = (key_index - (src_len - tgt_len)).clamp(0)
        return cls(
            key_index,
            query_index,
            left_out=first if mask.key_padding is None else first | mask.key_padding,
            hidden_key=_find_hidden_key(first, key_index, mask, tgt_len),
            hidden_of_query=_find_hidden_of_query(key_index, query_index, mask, src_len),
        )


def _split_terms(terms: Terms, tgt_len: int, src_len: int) -> tuple[Terms, Terms, Terms]:
    """Split terms into those of the kernels, of the first token's row, and of its column.

    The column is computed with the first token's key as a query, and the queries as its keys.
    """
    bare = terms._replace(first=None)
    sizes = [tgt_len + src_len - 1, 1, 1]
    by_distance: dict[str, Any] = {}
    row: dict[str, Any] = {}
    column: dict[str, Any] = {}
    for name, _, table in terms.present():
        by_distance[name], at_query, at_key = table.split(sizes, 1)
        row[name] = at_query.expand(-1, src_len, *table.shape[2:])
        column[name] = at_key.expand(-1, tgt_len, *table.shape[2:])
    column["query_table"], column["key_table"] = column.get("key_table"), column.get("query_table")
    return bare._replace(**by_distance), bare._replace(**row), bare._replace(**column)


def _select_token(x: Tensor, index: Tensor) -> Tensor:
    """Select one token of ``(B, H, n, D)`` at ``(B,)``: ``(B, H, 1, D)``."""
    return x.gather(2, index[:, None, None, None].expand(-1, x.size(1), 1, x.size(3)))


def _find_hidden_key(first: Tensor, key_index: Tensor, mask: Mask, tgt_len: int) -> Tensor:
    """Mark the queries that must not see the first token's key, or have none, ``(B, T)``."""
    hidden = ~first.any(1, keepdim=True)
    if mask.key_padding is not None:
        hidden = hidden | mask.key_padding.gather(1, key_index[:, None])
    queries = torch.arange(first.size(1) - tgt_len, first.size(1), device=first.device)
    hidden = hidden | mask.mark_hidden(key_index[:, None] - queries)
    if mask.pairs is not None:
        hidden = hidden | mask.pairs[:, key_index].T
    return hidden.expand(-1, tgt_len)


def _find_hidden_of_query(
    key_index: Tensor, query_index: Tensor, mask: Mask, src_len: int
) -> Tensor:
    """Mark the keys that the first token's query must not see, ``(B, S)``."""
    hidden = mask.key_padding
    if hidden is None:
        hidden = torch.zeros(len(key_index), src_len, dtype=torch.bool, device=key_index.device)
    keys = torch.arange(src_len, device=key_index.device)
    hidden = hidden | mask.mark_hidden(keys - key_index[:, None])
    if mask.pairs is not None:
        hidden = hidden | mask.pairs[query_index]
    return hidden
