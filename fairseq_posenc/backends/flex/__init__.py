"""Computes attention by torch's FlexAttention: a fused kernel, with the terms as ``score_mod``.

A block mask skips tiles in which no query sees a key. torch compiles a kernel for each combination
of terms and lengths, so lengths are rounded up, and the batch is dynamic. For each table of
vectors, all tokens are first multiplied by its rows at the visible distances, which takes memory
for ``(B, H, T, R)``: B batch, H heads, T queries, R rows.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.flex.scores import (
    TILE,
    ScoreMod,
    build_score_mod,
    index_or_zero,
    mark_batch_dynamic,
    round_length,
)
from fairseq_posenc.encodings.term import SinkScore
from fairseq_posenc.mask import Mask
from fairseq_posenc.precision import at_least_fp32, no_autocast

MIN_HEAD_DIM = 16
# With torch's own choice of stages, tiles of float32 did not fit into an H100's shared memory.
GPU_OPTIONS = {"num_stages": 1, "BLOCK_M": 64, "BLOCK_N": 64}
MAX_KERNELS = 1_000  # kernels that may be compiled; torch's two limits are 8 and 256 by default
UNSERVED = {  # why, by the name of a term
    "counted_table": "counted positions depend on all scores of a query",
    "channel_gain": "a gain for each channel is inside the dot product, not added to it",
    "value_table": "a table of values is outside the scores",
    "decay": "it adds no decay to scores",
}


def unavailable() -> str:
    """Explain why this backend cannot run on this machine; empty if it can."""
    return "" if torch.cuda.is_available() else "there is no CUDA device"


def refuses(call: AttentionCall) -> str:
    """Explain why FlexAttention cannot compute such a call; empty if it can."""
    device, head_dim = call.query.device.type, call.query.size(3)
    reasons = {
        "it does not return the attention weights": call.need_weights,
        "FlexAttention has no dropout of weights": call.dropout > 0,
        f"it runs on a GPU, not on {device}": device == "cpu",
        f"its heads are {MIN_HEAD_DIM} wide or more, not {head_dim}": head_dim < MIN_HEAD_DIM,
        **{UNSERVED[term.name]: True for term in call.terms if term.name in UNSERVED},
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute attended values ``(B, H, T, D)``, and no weights."""
    query, key, value, terms, mask, *_ = call.with_all_heads()  # keys and values of all H heads
    tgt_len, src_len = query.size(2), key.size(2)
    sizes = tgt_len, src_len, query.device  # unpadded; `mask.cache_deps`: its fields that hide keys
    blocks = mask.cached("flex", (*mask.cache_deps, *sizes), lambda: build_block_mask(mask, *sizes))
    query = F.pad(query, (0, 0, 0, round_length(tgt_len) - tgt_len))
    key, value = (F.pad(x, (0, 0, 0, round_length(src_len) - src_len)) for x in (key, value))
    with no_autocast(query.device):
        # `modify` hides nothing: the mask limits its table rows. Its tokens are padded as well.
        modify = build_score_mod(terms, *sizes, mask, query, key, call.temperature())
        scale, sink = terms.scale(query.size(-1)), terms.find(SinkScore)
        if sink is None:
            attended = _run_compiled(query, key, value, modify, blocks, scale=scale)
        else:  # weights with a sink: those without it, times the keys' share of the whole sum
            attended, logsumexp = _run_compiled(
                query, key, value, modify, blocks, scale=scale, return_lse=True
            )
            share = torch.sigmoid(logsumexp - at_least_fp32(sink.score)[:, None])  # [B, H, T]
            attended = (attended * share[..., None]).type_as(value)
    return attended[:, :, :tgt_len], None


def build_block_mask(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> BlockMask:
    """Build the mask of a call, by tiles and by pairs, given T and S before padding."""
    queries, keys = round_length(tgt_len), round_length(src_len)
    hidden = mask.forbidden(tgt_len, src_len, device)  # [B or 1, 1, T or 1, S]; None: no pair
    if hidden is None:
        hidden = torch.zeros(1, 1, 1, src_len, dtype=torch.bool, device=device)
    hidden = hidden[:, 0].expand(-1, tgt_len, -1)
    hidden = F.pad(hidden, (0, keys - src_len, 0, queries - tgt_len), value=True)
    mark_batch_dynamic(hidden)  # [B or 1, queries, keys]

    def visible_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~hidden[index_or_zero(hidden, 0, b), i, j]

    blocks = create_block_mask(visible_pair, len(hidden), 1, queries, keys, str(device), TILE)
    mark_batch_dynamic(*(x for x in vars(blocks).values() if isinstance(x, Tensor)))  # its tiles
    return blocks


@cache
def _compile_attention() -> Any:
    """Compile FlexAttention, once."""
    return torch.compile(flex_attention, fullgraph=True)


def _run_compiled(
    query: Tensor, key: Tensor, value: Tensor, modify: ScoreMod, blocks: BlockMask, **options: Any
) -> Any:
    """Call ``flex_attention``, compiled; ``options`` are its other arguments."""
    if query.device.type == "cuda":  # tests also run it on a CPU
        options["kernel_options"] = GPU_OPTIONS
    if torch.compiler.is_compiling():  # then it is compiled together with the caller
        return flex_attention(query, key, value, modify, blocks, **options)
    mark_batch_dynamic(query, key, value)
    with torch._dynamo.config.patch(
        recompile_limit=MAX_KERNELS,
        accumulated_recompile_limit=MAX_KERNELS,
        automatic_dynamic_shapes=False,  # lengths are rounded, and the batch is marked as dynamic
    ):
        return _compile_attention()(query, key, value, modify, blocks, **options)
