"""Attention of a single query, as in a step of decoding: no block, no matrix of scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Mask, row_index
from fairseq_posenc.encodings.base import Terms


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Terms,
    mask: Mask,
    dropout: float,
    scale: float,
) -> Tensor:
    """Return the attended values ``(B, H, 1, D)``; autograd gives the gradients.

    Args:
        query: ``(B, H, 1, D)``.
        key: ``(B, H, S, D)``.
        value: ``(B, H, S, D)``.
        terms: what the encodings add to the scores.
        mask: which keys the query may see.
        dropout: probability of dropping a weight.
        scale: of the combined dot products.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    rows = _Rows(terms, key.size(2), kind)
    scores = _combined(query.to(kind), key.to(kind), terms, rows) * scale
    if terms.bias is not None:
        scores = scores + rows(terms.bias).unsqueeze(2)
    if terms.pair_bias is not None:
        scores = scores + terms.pair_bias
    weights = _softmax(scores, mask)
    if dropout:
        weights = F.dropout(weights, dropout)
    attended = weights.type_as(value) @ value
    if terms.value_table is not None:
        attended = attended + (weights @ rows(terms.value_table)).type_as(value)
    return attended


class _Rows(NamedTuple):
    """Tables at the keys of the query, in the type of the scores."""

    terms: Terms
    src_len: int
    kind: torch.dtype

    def __call__(self, table: Tensor) -> Tensor:
        """Return a table's rows, ``(1 or B, G, S)`` or ``(1 or B, G, S, D)``."""
        if self.terms.first is None:
            return table.unsqueeze(0).to(self.kind)
        index = row_index(self.terms, 1, self.src_len, table.device)[:, 0]
        return table[:, index].transpose(0, 1).to(self.kind)


def _combined(query: Tensor, key: Tensor, terms: Terms, rows: _Rows) -> Tensor:
    """Return the sum or product of the terms, ``(B, H, 1, S)``."""
    by_key = terms.key_table
    content = query
    if (
        by_key is not None
        and by_key.stride(1) == 0
        and terms.first is None
        and not terms.multiplies
    ):
        # One row for all distances, as of Transformer-XL, may as well be added to the query.
        content, by_key = query + rows(by_key)[:, :, :1], None
    if terms.channel_gain is None:
        scores = content @ key.transpose(2, 3)
    else:
        scores = (query * rows(terms.channel_gain) * key).sum(3).unsqueeze(2)
    if terms.gain is not None:
        scores = scores * rows(terms.gain).unsqueeze(2)
    by_table = []
    if terms.query_table is not None:
        by_table.append(_products(query, rows(terms.query_table)))
    if by_key is not None:
        by_table.append((key * rows(by_key)).sum(3).unsqueeze(2))
    for term in by_table:
        scores = scores * term if terms.product else scores + term
    return scores


def _products(query: Tensor, table: Tensor) -> Tensor:
    """Return the products of ``(B, H, 1, D)`` with ``(1 or B, G, S, D)``, ``(B, H, 1, S)``."""
    if table.size(0) > 1:
        return query @ table.transpose(2, 3)
    # A batch of one would be copied for each sentence.
    if table.size(1) == 1:
        return query @ table[0, 0].T
    by_head = torch.bmm(query.squeeze(2).transpose(0, 1), table[0].transpose(1, 2))  # [H, B, S]
    return by_head.transpose(0, 1).unsqueeze(2)


def _softmax(scores: Tensor, mask: Mask) -> Tensor:
    forbidden = mask.forbidden(1, scores.size(3), scores.device)
    if forbidden is None:
        return scores.softmax(-1)
    weights = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(forbidden, 0.0)
