"""torch's fused attention, for terms that are a plain dot product with or without a bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Call, Mask, full, row_index, scale_of
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
    bias, kind = _bias(terms, query.size(2), key.size(2)), value.dtype
    if bias is None:
        return _attend(query, key, value, None, terms, mask, dropout), None
    # Scores in float32. With 16-bit queries torch adds such a bias on some devices only, and there
    # no faster on the whole (fp16 on a CPU: several times slower). Autocast would round it again.
    bias, query, key, value = (full(x) for x in (bias, query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return _attend(query, key, value, bias, terms, mask, dropout).to(kind), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    terms: Terms,
    mask: Mask,
    dropout: float,
) -> Tensor:
    tgt_len, src_len = query.size(2), key.size(2)
    plain = bias is None and mask.key_padding is None and mask.pairs is None
    # torch aligns its causal mask with the first key, so it serves square scores only.
    causal = plain and mask.direction == "lr" and tgt_len == src_len
    forbidden = None if causal else mask.forbidden(tgt_len, src_len, query.device)
    fully_masked = None
    if forbidden is not None:
        # No score can beat -inf. But a row of nothing else is NaN in some of torch's kernels, so a
        # query that may see no key sees them all, and gets its zeros below.
        fully_masked = forbidden.all(-1, keepdim=True)
        if bias is None:
            bias = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = torch.where(forbidden & ~fully_masked, -torch.inf, bias)
    scale = scale_of(terms, query.size(-1))
    attended = F.scaled_dot_product_attention(query, key, value, bias, dropout, causal, scale=scale)
    return attended if fully_masked is None else attended.masked_fill(fully_masked, 0.0)


def _bias(terms: Terms, tgt_len: int, src_len: int) -> Tensor | None:
    """Return all additive terms as one tensor ``(B or 1, G, T, S)``, without a needless batch."""
    bias = terms.pair_bias
    if terms.bias is not None:
        index = row_index(terms, tgt_len, src_len, terms.bias.device)
        by_distance = full(terms.bias)[:, index].transpose(0, 1)
        bias = by_distance if bias is None else bias + by_distance
    return bias
