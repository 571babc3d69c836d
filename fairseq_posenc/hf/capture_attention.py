"""Captures the attention of every layer and head in a forward pass, and the parts of its scores."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fairseq_posenc.analysis.split import CapturedAttention, split, with_attributes
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.hf.attention import (
    OUR_ATTENTION,
    POSITIONS,
    AttentionPositions,
    attend_with_positions,
    to_scale_factor,
)
from fairseq_posenc.hf.stack_forward import HFStackPositions


@torch.no_grad()
def capture_attention(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[CapturedAttention]:
    """Capture the attention of every layer in a forward pass without caches, stack by stack.

    Args:
        model: a model whose positions were set, in evaluation mode.
        inputs: inputs of the model; without padding if it has an encoder and a decoder, because
            the weights of attention to the encoder's output are computed without a mask.
    """
    captured: list[CapturedAttention] = []
    with ExitStack() as exits:
        for module in model.modules():
            positions = getattr(module, POSITIONS, None)
            if not isinstance(positions, HFStackPositions):
                continue
            name = "decoder" if positions.assembly.dims.causal else "encoder"
            layers = [part for part in module.modules() if isinstance(part, AttentionPositions)]
            for number, layer in enumerate(layers):
                hook = partial(_capture, name, number, captured)
                exits.callback(layer.register_forward_hook(hook).remove)
        exits.enter_context(_use_our_code(model))
        if model.config.is_encoder_decoder:
            exits.enter_context(_capture_cross_attention(model, captured))
        model(**inputs, use_cache=False)
    return sorted(captured, key=lambda attention: attention.sort_key)


def _capture(
    stack: str,
    number: int,
    captured: list[CapturedAttention],
    layer: AttentionPositions,
    args: tuple[Any, ...],
    _: Any,
) -> None:
    """Capture the attention of a layer; torch passes the last three arguments to forward hooks."""
    attention, query, key, value, state, scale, *_ = args
    state = state._replace(need_weights=True)
    call = layer.prepare_call(attention, query, key, value, state, scale)
    weights = reference.attend(call)[1]
    assert weights is not None
    parts = split(
        query,
        layer.repeat_heads(key),
        call.terms,
        layer.rotation(state.shared.of_kind(layer.kind)),
        mask=call.mask,
    )
    captured.append(
        CapturedAttention(stack, cross=False, layer=number, weights=weights, split=parts)
    )


@contextmanager
def _capture_cross_attention(
    model: PreTrainedModel, captured: list[CapturedAttention]
) -> Iterator[None]:
    """Capture attention to an encoder's output, in place of our attention function.

    This attention has none of our modules, to which a hook could be added.
    """
    encoder_modules = set(model.get_encoder().modules())

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not hasattr(module, POSITIONS) and module not in encoder_modules:
            width = query.size(-1)
            scale = named.get("scaling") or width**-0.5
            terms = Terms(scale_factor=to_scale_factor(scale, width))
            call = AttentionCall(query, key, value, terms, Mask(), need_weights=True)
            _, weights = reference.attend(call)
            assert weights is not None
            number = sum(attention.cross for attention in captured)  # layers run in their order
            parts = split(query, key, terms)
            captured.append(
                CapturedAttention("decoder", cross=True, layer=number, weights=weights, split=parts)
            )
        return attend_with_positions(module, query, key, value, *args, **named)

    AttentionInterface.register(OUR_ATTENTION, attend)
    try:
        yield
    finally:
        AttentionInterface.register(OUR_ATTENTION, attend_with_positions)


@contextmanager
def _use_our_code(model: PreTrainedModel) -> Iterator[None]:
    """Let our code attend and rotate, even where the model's code usually does so.

    Only then do its hooks see queries and keys before their rotation.
    """
    before = model.config._attn_implementation
    changes: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        if isinstance(module, HFStackPositions):
            changes.append((module, "is_native", False))
            changes.append((module, "is_rotated", [False] * len(module.is_rotated)))
        elif isinstance(module, AttentionPositions):
            changes.append((module, "is_rotated", False))
    model.set_attn_implementation(OUR_ATTENTION)
    try:
        with with_attributes(changes):
            yield
    finally:
        model.set_attn_implementation(before)
