"""torch's fused attention, for terms that are a plain dot product with or without a bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Call, Mask, by_distance, full, scale_of
from fairseq_posenc.encodings.terms import Terms


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
    sizes = query.size(2), key.size(2)
    of = (terms.bias, terms.pair_bias, terms.first, *mask[:3], *sizes, query.dtype, query.device)
    ready = mask.made("sdpa", of, lambda: _prepared(terms, mask, query, *sizes))
    if terms.bias is None and terms.pair_bias is None:
        return _attend(query, key, value, ready, terms, dropout), None
    # Scores in float32. With 16-bit queries torch adds such a bias on some devices only, and there
    # no faster on the whole (fp16 on a CPU: several times slower). Autocast would round it again.
    kind = value.dtype
    query, key, value = (full(x) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return _attend(query, key, value, ready, terms, dropout).to(kind), None


class _Prepared(NamedTuple):
    """What torch's attention is given beside queries, keys and values.

    Attributes:
        bias: ``(B or 1, G, T, S)``, with -inf where a query must not see a key, or None.
        causal: whether torch is to hide the future by itself.
        fully_masked: ``(B, 1, T, 1)``, queries that see no key, or None.
    """

    bias: Tensor | None
    causal: bool
    fully_masked: Tensor | None


def _prepared(terms: Terms, mask: Mask, query: Tensor, tgt_len: int, src_len: int) -> _Prepared:
    bias, mask = _bias(terms, mask, tgt_len, src_len)
    if bias is not None:
        bias = full(bias)
    plain = bias is None and not mask.may_hide_all
    # torch aligns its causal mask with the first key, so it serves square scores only.
    causal = plain and mask.direction == "lr" and tgt_len == src_len
    forbidden = None if causal else mask.forbidden(tgt_len, src_len, query.device)
    fully_masked = None
    if forbidden is not None:
        if mask.may_hide_all:
            # No score can beat -inf. But a row of nothing else is NaN in some of torch's kernels,
            # so a query that may see no key sees them all, and gets its zeros in the end.
            fully_masked = forbidden.all(-1, keepdim=True)
            forbidden = forbidden & ~fully_masked
        if bias is None:
            bias = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = bias.masked_fill(forbidden, -torch.inf)
    return _Prepared(bias, causal, fully_masked)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ready: _Prepared, terms: Terms, dropout: float
) -> Tensor:
    bias, causal, fully_masked = ready
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
