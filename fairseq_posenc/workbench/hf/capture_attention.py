"""Captures the attention of every layer and head in a forward pass, and the parts of its scores."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fairseq_posenc.analysis.split import CapturedAttention, split
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.derived import with_attributes
from fairseq_posenc.encodings.term import ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import AttentionPositions, attend_with_positions, plain_queries
from fairseq_posenc.hf.settings import LAYER_STATE, OUR_ATTENTION, POSITIONS


@torch.no_grad()
def capture_attention(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[CapturedAttention]:
    """Capture the attention of every layer in a forward pass without caches, stack by stack.

    Args:
        model: a model whose positions were set, in evaluation mode.
        inputs: of the model; no padding if it has cross-attention, which is captured without masks.

    Raises:
        UserError: the model's code does more after the rotation, which ours cannot repeat.
    """
    captured: list[CapturedAttention] = []
    encoder = {*model.get_encoder().modules()} if model.config.is_encoder_decoder else set()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        # `mask` is the attention mask, or empty: some models pass it by name, in `named`.
        # `set_positions` gives each self-attention this submodule; Whisper's encoder is left as is.
        positions: AttentionPositions | None = getattr(module, POSITIONS, None)
        if positions is not None or module not in encoder:
            # [B, H, T, D], before any scaling; scores are q_i.k_j / sqrt(factor * D).
            queries, factor = plain_queries(module, query, named.get("scaling"))
            if positions is None:  # attention to the encoder's output
                stack, cross, rotation = "decoder", True, None
                call = AttentionCall(queries, key, value, Terms([ScaleFactor(factor)]))
            else:
                stack, cross = "decoder" if positions.dims.causal else "encoder", False
                state = named[LAYER_STATE]  # a LayerState; `shared` is of all layers like this
                # The call has rotated queries and keys; `split` rotates the plain ones itself.
                call = positions.prepare_call(module, queries, key, value, state, factor)
                rotation = positions.rotation(state.shared, query.size(2))  # of all T, or None
            weights = cast(Tensor, reference.attend(call._replace(need_weights=True))[1])
            layer = len([x for x in captured if (x.stack, x.cross) == (stack, cross)])  # so far
            keys = key.repeat_interleave(query.size(1) // key.size(1), 1)  # H heads, for `split`
            parts = split(queries, keys, call.terms, rotation, mask=call.mask)  # of the scores
            captured.append(CapturedAttention(stack, cross, layer, weights, parts))
        return attend_with_positions(module, query, key, value, *mask, **named)

    # For queries and keys before their rotation: if `is_rotated` in a layer's plan is False, the
    # model's own code rotates by 0 (cosines of 1), and ours rotates.
    layers = [part for part in model.modules() if isinstance(part, AttentionPositions)]
    changes = [(layer, "plan", layer.plan._replace(is_rotated=False)) for layer in layers]
    usual = model(**inputs, use_cache=False)[0]  # logits or states, to compare with below
    before = model.config._attn_implementation
    try:
        AttentionInterface.register(OUR_ATTENTION, attend)  # for all models, until the end
        model.set_attn_implementation(OUR_ATTENTION)
        with with_attributes(changes):  # (module, attribute, value); restores them at the end
            repeated = model(**inputs, use_cache=False)[0]
    finally:
        AttentionInterface.register(OUR_ATTENTION, attend_with_positions)
        model.set_attn_implementation(before)
    rounding = max(1e-4, 16 * torch.finfo(model.dtype).eps) * usual.abs().max()
    # Larger, for example, for HunYuan, which normalizes what it has rotated. NaN is refused too.
    if not (repeated - usual).abs().max() <= rounding:
        raise UserError(f"{type(model).__name__} changes rotated queries and keys: not shown here")
    return sorted(captured, key=lambda x: (x.stack == "decoder", x.cross, x.layer))
