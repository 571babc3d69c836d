"""torch's fused attention, for terms that are a plain dot product with or without a bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Call, Mask, row_index, scale_of
from fairseq_posenc.encodings.base import Terms


def unavailable() -> str:
    """Return an empty string: it runs wherever torch does."""
    return ""


def refuses(terms: Terms, call: Call) -> str:
    """Return why torch's fused attention cannot compute such terms, or an empty string."""
    if call.need_weights:
        return "it does not return the attention weights"
    if not terms.content_only:
        return "the scores are more than a dot product and a bias"
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
    tgt_len, src_len = query.size(2), key.size(2)
    bias = _bias(terms, tgt_len, src_len, query.dtype)
    plain = bias is None and mask.key_padding is None and mask.pairs is None
    # torch aligns its causal mask with the first key, so it serves square scores only.
    causal = plain and mask.direction == "lr" and tgt_len == src_len
    forbidden = None if causal else mask.forbidden(tgt_len, src_len, query.device)
    blind = None
    if forbidden is not None:
        # No score can beat -inf. But a row of nothing else is NaN in some of torch's kernels, so a
        # query that may see no key sees them all, and gets its zeros below.
        blind = forbidden.all(-1, keepdim=True)
        if bias is None:
            bias = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = torch.where(forbidden & ~blind, -torch.inf, bias)
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale_of(terms, query.size(-1)),
    )
    if blind is not None:
        attended = attended.masked_fill(blind, 0.0)
    return attended, None


def _bias(terms: Terms, tgt_len: int, src_len: int, dtype: torch.dtype) -> Tensor | None:
    """Return all additive terms as one tensor ``(B or 1, G, T, S)``, without a needless batch."""
    bias = terms.pair_bias
    if terms.bias is not None:
        index = row_index(terms, tgt_len, src_len, terms.bias.device)
        by_distance = terms.bias[:, index].transpose(0, 1)
        bias = by_distance if bias is None else bias + by_distance
    return None if bias is None else bias.to(dtype)
