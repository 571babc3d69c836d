"""Computes attention by torch's FlexAttention: a fused kernel, with the terms as ``score_mod``.

Masks become a block mask, so that tiles in which no query sees a key are skipped. torch compiles a
kernel for each combination of terms and lengths; lengths are therefore rounded up (``blocks.py``),
and the batch is dynamic. For each table of vectors, all tokens are first multiplied with its rows
at the visible distances, which takes memory for ``(B, H, T, R)``.
"""

import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fairseq_posenc.backends.base import AttentionCall, CallFeatures
from fairseq_posenc.backends.flex.blocks import build_block_mask, mark_batch_dynamic, round_length
from fairseq_posenc.backends.flex.scores import ScoreMod, build_score_mod
from fairseq_posenc.encodings.precision import at_least_fp32, no_autocast
from fairseq_posenc.encodings.term import CountedRows, SinkScore
from fairseq_posenc.encodings.terms import Terms

MIN_GPU_HEAD_DIM = 16
# With torch's own choice of stages, tiles of float32 did not fit into an H100's shared memory.
GPU_OPTIONS = {"num_stages": 1, "BLOCK_M": 64, "BLOCK_N": 64}
MAX_KERNELS = 1_000  # the number of kernels that may be compiled; torch's default is 8


def unavailable() -> str:
    """Explain why FlexAttention cannot be compiled on this machine; empty if it can."""
    if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
        return ""
    return "torch compiles it, and found no C++ compiler (g++)"


def refuses(terms: Terms, call: CallFeatures) -> str:
    """Explain why FlexAttention cannot compute such a call; empty if it can."""
    if call.need_weights:
        return "it does not return the attention weights"
    if call.dropout:
        return "FlexAttention has no dropout of weights"
    on_cpu = call.device == "cpu"
    if on_cpu and call.learns:
        return "on a CPU FlexAttention has no backward pass: train with another"
    if on_cpu and call.dtype == torch.float64:
        return "on a CPU FlexAttention has no float64"
    if on_cpu and terms.has(SinkScore):
        return "on a CPU FlexAttention does not return the sum that a sink joins"
    if not on_cpu and call.head_dim < MIN_GPU_HEAD_DIM:
        return f"on a GPU its heads are {MIN_GPU_HEAD_DIM} wide or more, not {call.head_dim}"
    if terms.has(CountedRows):
        return "counted positions depend on all scores of a query"
    if terms.rows("channel") is not None:
        return "a gain for each channel is inside the dot product, where score_mod does not reach"
    return "" if terms.rows("value") is None else "a table of values is outside the scores"


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute a call; see :class:`~fairseq_posenc.backends.base.Backend`."""
    call = call.with_all_heads()
    query, key, value, terms, mask, *_ = call
    if query.device.type == "cpu" and query.size(0) > 1:  # there, torch computes batches wrongly
        sentences = [attend(_select_sentence(call, b))[0] for b in range(query.size(0))]
        return torch.cat(sentences), None
    tgt_len, src_len = query.size(2), key.size(2)
    queries, keys = round_length(tgt_len), round_length(src_len)
    sizes = tgt_len, src_len, query.device  # before padding
    blocks = mask.cached("flex", (*mask.cache_deps, *sizes), lambda: build_block_mask(mask, *sizes))
    query = F.pad(query, (0, 0, 0, queries - tgt_len))
    key, value = (F.pad(x, (0, 0, 0, keys - src_len)) for x in (key, value))
    with no_autocast(query.device):
        modify = build_score_mod(
            terms, *sizes, mask, query, key, temperature=call.temperature(), decay=call.decay()
        )
        scale, sink = terms.scale(query.size(-1)), terms.find(SinkScore)
        if sink is None:
            attended = _run_compiled(query, key, value, modify, blocks, scale=scale)
        else:  # a softmax with the sink is that of the keys, times their share of the whole sum
            attended, logsumexp = _run_compiled(
                query, key, value, modify, blocks, scale=scale, return_lse=True
            )
            share = torch.sigmoid(logsumexp - at_least_fp32(sink.score)[:, None])  # [B, H, T]
            attended = (attended * share[..., None]).type_as(value)
    return attended[:, :, :tgt_len], None


def _select_sentence(call: AttentionCall, index: int) -> AttentionCall:
    """Select one sentence of a call, as a batch of one."""
    return call._replace(
        query=call.query[index : index + 1],
        key=call.key[index : index + 1],
        value=call.value[index : index + 1],
        terms=Terms([term.select_sentence(index) for term in call.terms]),
        mask=call.mask.select_sentences(slice(index, index + 1)),
    )


@cache
def _compile_attention() -> Any:
    """Compile FlexAttention, once."""
    return torch.compile(flex_attention, fullgraph=True)


def _run_compiled(
    query: Tensor, key: Tensor, value: Tensor, modify: ScoreMod, blocks: BlockMask, **options: Any
) -> Any:
    """Call ``flex_attention``, compiled, with further options of it."""
    if query.device.type == "cuda":
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
