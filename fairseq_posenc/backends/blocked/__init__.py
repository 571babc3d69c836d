"""Attention a block of queries at a time, in plain PyTorch, with a hand-written backward pass.

Scores exist for one block at a time and are computed again in the backward pass, and so are the
numbers that dropout draws: memory grows linearly with the length. Up to 512 tokens, where that is
not much, the blocks are held instead. Serves every term but a gain of channels. A single query
makes no block: it is left to the reference, which is fast there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import Call, Mask, scale_of
from fairseq_posenc.backends.blocked.dropout import Dropout
from fairseq_posenc.backends.blocked.function import BlockedAttention
from fairseq_posenc.backends.blocked.geometry import Geometry
from fairseq_posenc.backends.blocked.tables import Tables
from fairseq_posenc.encodings.base import Terms


def unavailable() -> str:
    """Return an empty string: it runs wherever torch does."""
    return ""


def refuses(terms: Terms, call: Call) -> str:
    """Return why this backend cannot compute such terms, or an empty string."""
    if call.need_weights:
        return "it does not keep the attention weights"
    if terms.channel_gain is not None and call.tgt_len > 1:
        return "no matrix product computes a gain for each channel"
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
    if query.size(2) == 1:
        return reference.attend(query, key, value, terms, mask, dropout)
    if torch.is_autocast_enabled(query.device.type):
        with torch.autocast(query.device.type, enabled=False):
            return attend(query, key, value, terms, mask, dropout, need_weights)
    scale = scale_of(terms, query.size(-1))
    kind = torch.promote_types(query.dtype, torch.float32)
    terms, query_scale = _scaled(terms, kind, scale)
    geometry = Geometry.of(query, key.size(2), mask, terms)
    kept = None
    if dropout:
        shape = (*query.shape[:2], geometry.padded_tgt)
        kept = Dropout.draw(dropout, shape, geometry.padded_src, query.device)
    tables = Tables.of(terms, geometry, kind)
    learns = any(x is not None and x.requires_grad for x in (query, key, value, *tables))
    keeps = geometry.is_short and learns and torch.is_grad_enabled()
    blind = _blind(mask, query.size(2), key.size(2))
    return BlockedAttention.apply(
        geometry, kept, terms.product, query_scale, blind, keeps, query, key, value, *tables
    ), None


def _scaled(terms: Terms, kind: torch.dtype, scale: float) -> tuple[Terms, float]:
    """Return terms that bring the scale, and what is left of it to the queries.

    A sum is scaled term by term; a product only once, and one of nothing else is a plain one.
    """
    if terms.key_table is not None:
        terms = terms._replace(key_table=terms.key_table.to(kind) * scale)
        return terms, 1.0 if terms.product else scale
    if terms.product and terms.query_table is not None:
        return terms._replace(query_table=terms.query_table.to(kind) * scale), 1.0
    return terms._replace(product=False), scale


def _blind(mask: Mask, tgt_len: int, src_len: int) -> Tensor | None:
    """Return the queries that may see no key, ``(B, T)``, or None where all see one."""
    if mask.pairs is not None:
        forbidden = mask.forbidden(tgt_len, src_len, mask.pairs.device)
        assert forbidden is not None
        return forbidden.all(-1)[:, 0]
    if mask.key_padding is None:
        return None  # the diagonal is never masked
    real = ~mask.key_padding
    if mask.direction == "lr":
        seen = real.cummax(1).values
    elif mask.direction == "rl":
        seen = real.flip(1).cummax(1).values.flip(1)
    else:
        seen = real.any(1, keepdim=True).expand_as(real)
    return ~seen[:, src_len - tgt_len :]
