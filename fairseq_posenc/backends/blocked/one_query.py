"""Attention of a single query, as in a step of decoding: no block, no matrix of scores."""

from __future__ import annotations

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
    query, key = query.to(kind), key.to(kind)
    src_len = key.size(2)

    def at_keys(table: Tensor) -> Tensor:
        """Return the rows of the keys, ``(1 or B, G, S)`` or ``(1 or B, G, S, D)``."""
        if terms.first is None:
            return table[None, :, :src_len].to(kind)
        index = row_index(terms, 1, src_len, table.device)[:, 0]
        return table[:, index].transpose(0, 1).to(kind)

    scores = query @ key.transpose(2, 3)
    if terms.gain is not None:
        scores = scores * at_keys(terms.gain).unsqueeze(2)
    by_table = []
    if terms.query_table is not None:
        by_table.append(query @ at_keys(terms.query_table).transpose(2, 3))
    if terms.key_table is not None:
        by_table.append((key * at_keys(terms.key_table)).sum(3).unsqueeze(2))
    for term in by_table:
        scores = scores * term if terms.product else scores + term
    scores = scores * scale
    if terms.bias is not None:
        scores = scores + at_keys(terms.bias).unsqueeze(2)
    if terms.pair_bias is not None:
        scores = scores + terms.pair_bias
    weights = F.dropout(_softmax(scores, mask), dropout)
    attended = weights.type_as(value) @ value
    if terms.value_table is not None:
        attended = attended + (weights @ at_keys(terms.value_table)).type_as(value)
    return attended


def _softmax(scores: Tensor, mask: Mask) -> Tensor:
    forbidden = mask.forbidden(1, scores.size(3), scores.device)
    if forbidden is None:
        return scores.softmax(-1)
    weights = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(forbidden, 0.0)
