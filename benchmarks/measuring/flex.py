"""FlexAttention as a rival: torch's compiled attention with the terms in its ``score_mod``.

It has the interface of a backend (:class:`~fairseq_posenc.backends.base.Backend`), but only the
benchmarks use it. It has no dropout, and on the CPU no backward pass, so it competes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fairseq_posenc.backends.base import AttentionCall, CallFeatures, Mask, score_scale
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError


def unavailable() -> str:
    """Return why it cannot run on this machine, or an empty string."""
    return ""


def refuses(terms: Terms, call: CallFeatures) -> str:
    """Return why FlexAttention cannot compute such terms here, or an empty string."""
    if call.need_weights:
        return "it does not return the attention weights"
    if terms.channel_gain is not None:
        return "a gain for each channel is inside the dot product, where score_mod does not reach"
    if terms.value_table is not None:
        return "a table of values is outside the scores"
    if terms.first is not None:
        return "the benchmark does not write the reset as a score_mod"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """See :class:`~fairseq_posenc.backends.base.Backend`; no masks here.

    Raises:
        UserError: dropout, which FlexAttention does not have, or a mask.
    """
    query, key, value, terms, mask, dropout, _ = call
    if dropout or mask != Mask():
        raise UserError("FlexAttention competes without dropout and without masks")
    score_mod = _score_mod(query, key, terms)
    scale = score_scale(terms, query.size(-1))
    flex: Any = _compiled() if query.is_cuda else flex_attention
    return flex(query, key, value, score_mod=score_mod, scale=scale), None


@cache
def _compiled() -> Any:
    # A kernel for each encoding and length; beyond its limits torch would go on uncompiled.
    torch._dynamo.config.recompile_limit = 1_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _score_mod(query: Tensor, key: Tensor, terms: Terms) -> Callable[..., Tensor]:
    """Return the equation of the scores, for scores that come as scaled dot products."""
    last = query.size(2) - 1
    # The scores come scaled; what is added to them has to be, too, and what multiplies them not.
    scale = 1.0 if terms.product else score_scale(terms, query.size(-1))
    by_query = _products(query, terms.query_table, scale)
    by_key = _products(key, terms.key_table, scale)
    gain, bias, pair_bias = terms.gain, terms.bias, terms.pair_bias

    def group(table: Tensor, dim: int, index: Tensor) -> Tensor:
        return index if table.size(dim) > 1 else torch.zeros_like(index)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = j - i + last
        if gain is not None:
            score = score * gain[group(gain, 0, h), row]
        if by_query is not None:
            term = by_query[b, h, i, row]
            score = score * term if terms.product else score + term
        if by_key is not None:
            term = by_key[b, h, j, row]
            score = score * term if terms.product else score + term
        if bias is not None:
            score = score + bias[group(bias, 0, h), row]
        if pair_bias is not None:
            score = score + pair_bias[group(pair_bias, 0, b), group(pair_bias, 1, h), i, j]
        return score

    return score_mod


def _products(x: Tensor, table: Tensor | None, scale: float) -> Tensor | None:
    """Return scaled products of ``(B, H, T, D)`` with rows of ``(G, R, D)``: ``(B, H, T, R)``."""
    return None if table is None else (x * scale) @ table.to(x.dtype).transpose(-1, -2)
