"""torch's fused attention, for terms that are a plain dot product with or without a bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Call, Mask, by_distance, full, scale_of
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
    kind = value.dtype
    bias, mask = _bias(terms, mask, query.size(2), key.size(2))
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
        if mask.may_hide_all:
            # No score can beat -inf. But a row of nothing else is NaN in some of torch's kernels,
            # so a query that may see no key sees them all, and gets its zeros below.
            fully_masked = forbidden.all(-1, keepdim=True)
            forbidden = forbidden & ~fully_masked
        if bias is None:
            bias = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = bias.masked_fill(forbidden, -torch.inf)
    scale = scale_of(terms, query.size(-1))
    attended = F.scaled_dot_product_attention(query, key, value, bias, dropout, causal, scale=scale)
    return attended if fully_masked is None else attended.masked_fill(fully_masked, 0.0)


def _bias(terms: Terms, mask: Mask, tgt_len: int, src_len: int) -> tuple[Tensor | None, Mask]:
    """Return all additive terms as one tensor ``(B or 1, G, T, S)``, without a needless batch.

    With the mask that is left: a direction is a matter of distance, too, and cheaper there.
    """
    if terms.bias is None:
        return terms.pair_bias, mask
    table = full(terms.bias)
    if terms.first is None and not mask.may_hide_all:
        table, mask = _hidden(table, mask.direction, tgt_len, src_len), Mask()
    bias = by_distance(table, tgt_len, src_len, terms.first)
    return bias if terms.pair_bias is None else bias + terms.pair_bias, mask


def _hidden(table: Tensor, direction: str, tgt_len: int, src_len: int) -> Tensor:
    """Return the numbers ``(G, R)`` with -inf at the distances that a direction hides."""
    if direction == "lr":
        return F.pad(table[:, :src_len], (0, tgt_len - 1), value=-torch.inf)
    if direction == "rl":
        return F.pad(table[:, src_len - 1 :], (src_len - 1, 0), value=-torch.inf)
    return table
