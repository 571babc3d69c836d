"""The equation of the scores, written out. Serves every encoding; memory O(B * H * T * S).

This is the backend that the others are compared with: plain operations, gradients by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Mask, row_index, scale_of
from fairseq_posenc.encodings.base import Terms


def refuses(terms: Terms, need_weights: bool) -> str:
    """Return an empty string: the reference serves everything."""
    return ""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Terms,
    mask: Mask,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See :class:`~fairseq_posenc.backends.base.Backend`."""
    # Scores and softmax in float32 at least: the product of three terms overflows fp16.
    with torch.autocast(query.device.type, enabled=False):
        weights = softmax(scores(query, key, terms), mask)
    dropped = F.dropout(weights, dropout) if dropout else weights
    attended = dropped.type_as(value) @ value
    return attended, weights if need_weights else None


def scores(query: Tensor, key: Tensor, terms: Terms) -> Tensor:
    """Return the scores before masks and softmax, ``(B, H, T, S)`` in float32 or float64."""
    query, key = _full(query), _full(key)
    index = row_index(terms, query.size(2), key.size(2), query.device)
    combined = query @ key.transpose(-1, -2)
    if terms.gain is not None:
        combined = combined * _by_distance(terms.gain, index)
    by_table = []
    if terms.query_table is not None:
        by_table.append(_pick(query @ _full(terms.query_table).transpose(-1, -2), index))
    if terms.key_table is not None:
        rows = _pick(key @ _full(terms.key_table).transpose(-1, -2), index.transpose(-1, -2))
        by_table.append(rows.transpose(-1, -2))
    for term in by_table:
        combined = combined * term if terms.product else combined + term
    combined = combined * scale_of(terms, query.size(-1))
    if terms.bias is not None:
        combined = combined + _by_distance(terms.bias, index)
    if terms.pair_bias is not None:
        combined = combined + _full(terms.pair_bias)
    return combined


def softmax(scores: Tensor, mask: Mask) -> Tensor:
    """Return the attention weights; a query that may see no key gets zeros.

    Masks come last: they are applied to the whole score, and never multiplied.
    """
    forbidden = mask.forbidden(scores.size(2), scores.size(3), scores.device)
    if forbidden is None:
        return scores.softmax(-1)
    # A finite fill, then exact zeros: a row of -inf would give NaN, also in the gradient.
    weights = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(forbidden, 0.0)


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_distance(table: Tensor, index: Tensor) -> Tensor:
    """Return the entries of ``(G, R)`` at ``(1 or B, T, S)``: ``(1 or B, G, T, S)``."""
    return _full(table)[:, index].transpose(0, 1)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[b, h, t, index[b, t, s]]`` of ``(B, H, T, R)``: ``(B, H, T, S)``."""
    shape = (*x.shape[:3], index.size(-1))
    return x.gather(-1, index.unsqueeze(1).expand(shape))
