"""Captures attention weights and the parts of scores of every layer and head in a forward pass.

The attention report, the plots and the message of a diverged training show the weights and parts.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.analysis.split import CapturedAttention, Split, split
from fairseq_posenc.derived import with_attributes
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import state_of_kind
from fairseq_posenc.transformer.layers import RotatedProjection

# For example decoder.layers.3.encoder_attn or encoder.sentence_encoder.layers.0.self_attn.
_NAME = re.compile(r"(encoder|decoder)\.(?:.+\.)?layers\.(\d+)\.(self_attn|encoder_attn)$")


@torch.no_grad()
def capture_attention(model: nn.Module, run: Callable[[], Any]) -> list[CapturedAttention]:
    """Capture the weights and scores of every attention in a forward pass, stack by stack.

    Args:
        model: a fairseq model, its own or one of this package, in evaluation mode.
        run: calls the model with all tokens at once, not in steps of decoding.
    """
    captured: list[CapturedAttention] = []
    changes: list[tuple[nn.Module, str, Any]] = []  # module, attribute, its value during `run`
    with ExitStack() as cleanup:
        for name, module in model.named_modules():
            if isinstance(module, TransformerEncoderLayerBase):
                changes.append((module, "can_use_fastpath", False))  # which returns no weights
            elif (match := _NAME.search(name)) and isinstance(module, MultiheadAttention):
                # torch's function returns only the mean over heads. With this attribute, fairseq
                # computes attention itself.
                changes.append((module, "skip_embed_dim_check", True))
                before = module.register_forward_pre_hook(_request_weights, with_kwargs=True)
                hook = partial(_capture, match, captured)
                cleanup.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                cleanup.callback(before.remove)
        cleanup.enter_context(with_attributes(changes))  # sets them, and restores them at the end
        run()
    return sorted(captured, key=lambda x: (x.stack == "decoder", x.cross, x.layer))  # encoder first


def _request_weights(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let fairseq return the weights of each head, as a hook before the forward pass."""
    return args, {**kwargs, "need_weights": True, "need_head_weights": True}


def _capture(
    match: re.Match[str],
    captured: list[CapturedAttention],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> None:
    """Capture the attention of a module, as a forward hook; fairseq's layers pass keywords."""
    stack, layer, attention = match.groups()
    captured.append(
        CapturedAttention(
            stack=stack,
            cross=attention == "encoder_attn",  # of a decoder to the encoder's output
            layer=int(layer),
            weights=out[1].transpose(0, 1),  # of each head, [H, B, T, S] -> [B, H, T, S]
            split=_split_scores(module, kwargs["query"], kwargs["key"]),
        )
    )


def _split_scores(attention: MultiheadAttention, queries: Tensor, keys: Tensor) -> Split:
    """Split the scores of inputs ``(T, B, C)``, ``(S, B, C)``: from content, position, both.

    It follows the steps of :class:`~fairseq_posenc.transformer.attention.PositionalAttention`,
    whose backends return scores only as a sum, if at all.
    """

    def project(x: Tensor, projection: Any) -> Tensor:
        projected = F.linear(x, projection.weight, projection.bias)  # projection(x) may rotate
        return projected.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3)

    query = project(queries, attention.q_proj)  # [B, H, T, D]; `split` scales and rotates
    key = project(keys, attention.k_proj)  # [B, H, S, D]
    if isinstance(attention, PositionalAttention):
        # The layer's state of this forward pass, which is still set when hooks run.
        shared = state_of_kind(attention.stack, attention.kind)
        of_input = attention.encodings.input_terms(queries.transpose(0, 1), shared.positions)
        terms = attention.compute_terms(shared) | of_input
        rotation = attention.rotation(shared, shared.positions.tgt_len)  # of all tokens, or None
        mask = shared.mask.with_direction(attention.direction)  # for `cope`, which counts keys
        return split(query, key, terms, rotation, mask=mask)  # keys are the queries' tokens
    if isinstance(attention.q_proj, RotatedProjection):
        # Attention to an encoder's output, with rope(cross_attention=true).
        shared = state_of_kind(attention.q_proj.stack, attention.q_proj.kind)
        return split(query, key, Terms(), shared.rotation, key_rotation=shared.source_rotation)
    return split(query, key, Terms())  # fairseq's own attention has no positions
