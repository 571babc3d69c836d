"""torch's fused attention, for scores that are a plain dot product with or without a bias.

Masks become a bias of each pair; decay becomes two more channels of queries and keys; temperatures
multiply the queries.

B batch, H heads, T queries, S keys, D head size, G heads of a bias (1 or H).
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_posenc.backends.base import AttentionCall, no_reason
from fairseq_posenc.backends.by_distance import sum_biases
from fairseq_posenc.encodings.term import (
    CountTemperature,
    Decay,
    NumbersByDistance,
    NumbersByPair,
    ScoreCap,
    SinkScore,
    Temperature,
)
from fairseq_posenc.mask import Mask
from fairseq_posenc.precision import at_least_fp32, no_autocast
from fairseq_posenc.torch_modes import is_exporting

unavailable = no_reason


def refuses(call: AttentionCall) -> str:
    """Explain why torch's fused attention cannot compute such terms; empty if it can."""
    terms, decay = call.terms, call.terms.find(Decay)
    if call.need_weights:
        return "it does not return the attention weights"
    if terms.has(ScoreCap, SinkScore):
        return "torch's attention has no cap of scores and no sink"
    if not terms.is_biased_dot_product:
        return "the scores are more than a dot product and a bias"
    if terms.has(Temperature, CountTemperature) and terms.has(NumbersByDistance, NumbersByPair):
        return "a temperature multiplies the bias as well"
    if decay is not None and decay.later is not None and call.mask.direction == "both":
        return "decay in two directions is not a dot product"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute attended values ``(B, H, T, D)``, and no weights."""
    # Groups of heads are left to torch, with three exceptions: its kernels for GPUs copy the heads
    # if there is a bias, decay differs in each head, and exported graphs may have no groups.
    if call.query.device.type != "cpu" or call.terms.has(Decay) or is_exporting():
        call = call.with_all_heads()
    query, key, value, terms, mask, dropout, _ = call
    tgt_len, src_len, device = query.size(2), key.size(2), query.device
    scale = terms.scale(query.size(-1))
    decay, _ = call.decay()  # c of each token, [B or 1, H, S, parts]; `refuses` allows no second
    if decay is not None:
        query, key, value = (at_least_fp32(x) for x in (query, key, value))
        query, key, value = _append_decay(query * scale, key, value, decay)
        scale = 1.0
    if (temperature := call.temperature()) is not None:  # [B or 1, G, T]
        query = (at_least_fp32(query) * temperature[..., None]).type_as(query)
    has_bias = terms.has(NumbersByDistance, NumbersByPair)
    is_exact = has_bias or decay is not None  # autocast would round a bias again
    if is_exact:
        dtype = _choose_bias_dtype(query, value)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # torch's own causal mask aligns the first query with the first key: it serves square scores
    # only, and nothing else may be hidden. In graphs, comparing lengths gives a SymBool, so `bool`.
    hides_more = mask.may_hide_all or mask.has_limits  # padding or pairs; a window or segments
    causal = mask.direction == "lr" and not (has_bias or hides_more) and bool(tgt_len == src_len)
    bias = None
    if not causal:
        total = sum_biases(terms, tgt_len, src_len, mask)  # [B or 1, G, T, S], or None
        # Layers of a forward pass share the result, as long as all that it depends on is the same.
        deps = (total, *mask.cache_deps, tgt_len, src_len, device, query.dtype)
        bias = mask.cached("sdpa", deps, lambda: _build_bias(total, query, mask, src_len))
    kernels = _choose_kernels(device.type, bias, src_len)
    with (
        no_autocast(device) if is_exact else nullcontext(),
        sdpa_kernel(kernels) if kernels else nullcontext(),
    ):
        is_grouped = query.size(1) != key.size(1)
        attended = F.scaled_dot_product_attention(
            query, key, value, bias, dropout, is_causal=causal, scale=scale, enable_gqa=is_grouped
        )
    if mask.may_hide_all:  # padding or pairs may leave a query without any key: it gets zeros
        visible = mask.count_visible(tgt_len, src_len, device)
        attended = attended.masked_fill(visible.eq(0)[:, None, :, None], 0.0)  # [B or 1, 1, T, 1]
    # Decay made the values wider, and float32.
    return attended[..., : call.value.size(-1)].to(call.value.dtype), None


def _append_decay(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the decay c to scaled queries and keys, float32 at least, as c adds up over tokens.

    c is the sum of the parts of ``decay``, ``(B or 1, H, S, parts)``: a rounded value and its rest.
    The dot product [q_i, c_i, 1].[k_j, 1, -c_j] includes c_i - c_j. Values get as many channels, of
    zeros, and on a GPU zeros fill all three up to a fast width (:func:`_count_decay_channels`).
    """
    past = key.size(2) - query.size(2)
    # Less the last token's c, part by part, so that a step of decoding rounds no large sum.
    summed = (decay - decay[:, :, -1:]).sum(-1).to(query.dtype)  # [B or 1, H, S]
    c = summed.expand(key.shape[:3])[..., None]  # [B, H, S, 1]
    ones = torch.ones_like(c)
    query = torch.cat([query, c[:, :, past:], ones[:, :, past:]], -1)
    key = torch.cat([key, ones, -c], -1)  # [B, H, S, D + 2]
    channels = _count_decay_channels(value.size(-1), value.device)
    if channels > 2:
        query, key = (F.pad(x, (0, channels - 2)) for x in (query, key))
    return query, key, F.pad(value, (0, channels))


def _count_decay_channels(width: int, device: torch.device) -> int:
    """Count the channels of decay after ``width`` others, and of zeros that a device needs.

    torch's only fused kernel for float32 on a GPU takes multiples of 4. On a CPU all widths are
    as fast, and a copy for the zeros would double the time of a step.
    """
    return 2 + (-(width + 2) % 4 if device.type == "cuda" else 0)


def _choose_bias_dtype(query: Tensor, value: Tensor) -> torch.dtype:
    """Choose the type of a bias, and of the queries, keys and values with it.

    On a GPU it is that of the values: kernels read a bias of another type wrongly (pytorch#191612),
    and in float32 they are several times slower. On a CPU, attention with a bias is no faster in 16
    bits than in float32 (in fp16 several times slower), so there scores are in float32.
    """
    if query.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16):
        return value.dtype
    return torch.promote_types(query.dtype, torch.float32)


def _build_bias(bias: Tensor | None, query: Tensor, mask: Mask, src_len: int) -> Tensor | None:
    """Convert a bias to the type of queries, and set it to -inf where a query must not see a key.

    torch does not check the type: with float64 queries it reads a float32 bias as float64.
    """
    bias = None if bias is None else bias.to(query.dtype)
    hidden = mask.forbidden(query.size(2), src_len, query.device)
    if hidden is None:
        return bias
    if mask.may_hide_all:
        # In some of torch's kernels, a row of nothing but -inf gives NaN. So a query that may see
        # no key sees them all, and its result is set to zero in the end.
        hidden = hidden & ~hidden.all(-1, keepdim=True)
    bias = query.new_zeros(()) if bias is None else bias
    return bias.masked_fill(hidden, -torch.inf)


def _choose_kernels(device: str, bias: Tensor | None, src_len: int) -> list[SDPBackend]:
    """Choose the kernels that torch may take; empty for all.

    cuDNN has no gradient of a bias, and with a mask it gives NaN as a gradient of queries if only
    64 keys are in the last block of 128 (pytorch#196678).
    """
    if device != "cuda" or bias is None or not (bias.requires_grad or src_len % 128 == 64):
        return []
    return [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
