"""Builds CTranslate2's specification of a model: a tree of layers, whose leaves are the weights."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from ctranslate2.converters.fairseq import (
    set_embeddings,
    set_layer_norm,
    set_linear,
    set_transformer_decoder_layer,
    set_transformer_encoder_layer,
)
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.model_spec import LayerSpec, ModelSpec
from ctranslate2.specs.transformer_spec import (
    TransformerDecoderModelSpec,
    TransformerDecoderSpec,
    TransformerEncoderSpec,
    TransformerSpec,
)

from fairseq_posenc.errors import UserError
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.convert.exchange.ctranslate2.positions import (
    PlacedPositions,
    place_positions,
)
from fairseq_posenc.workbench.loading.open_model import OpenModel

_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELUTanh,
    "gelu_accurate": Activation.GELUTanh,
    "tanh": Activation.Tanh,
}
# The names of the weights that CTranslate2 reads.
_ATTENTION = r"(self|encoder)_attn(\.[qkv]_proj|\.out_proj|_layer_norm)"
_LAYER = rf"layers\.\d+\.({_ATTENTION}|fc[12]|final_layer_norm)"
_STACK = rf"(embed_tokens|layernorm_embedding|{_LAYER}|layer_norm|output_projection)"
_HAS_PLACE = re.compile(rf"(encoder|decoder)\.{_STACK}\.(weight|bias)")


@torch.no_grad()
def build_specification(trained: OpenModel, vocabularies: list[list[str]]) -> ModelSpec:
    """Build and check the specification of a model, whose weights are float32.

    Args:
        trained: the model.
        vocabularies: symbols of each dictionary, the source's first.

    Raises:
        UserError: the model has something that CTranslate2 does not support.
    """
    _refuse_other_weights(trained)
    decoder = _build_decoder(trained)
    if trained.translates:
        spec: Any = TransformerSpec(_build_encoder(trained.stacks["encoder"]), decoder)
        spec.register_source_vocabulary(vocabularies[0])
        spec.register_target_vocabulary(vocabularies[1])
        # fairseq's decoders begin with </s>, as do its causal LMs without the option below.
        spec.config.decoder_start_token = spec.config.eos_token
        spec.config.add_source_eos = True
    else:
        spec = TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocabularies[0])
        if not trained.settings.task.get("add_bos_token"):
            spec.config.bos_token = spec.config.eos_token
    # Quantization changes a specification in place, and this one shares the model's weights.
    spec = copy.deepcopy(spec)
    spec.validate()
    return spec


def _refuse_other_weights(trained: OpenModel) -> None:
    """Refuse a model with weights that CTranslate2 does not read."""
    names = [name for name in trained.weights if not is_position_parameter(name)]
    if others := [name for name in names if not _HAS_PLACE.fullmatch(name)]:
        rest = f" and {len(others) - 1} other weights" if len(others) > 1 else ""
        raise UserError(f"--to ctranslate2: CTranslate2 has no place for {others[0]}{rest}")


def _build_encoder(stack: Any) -> TransformerEncoderSpec:
    # Encoders read no prompts, and never have ALiBi's bias as such: `placed.alibi` is False.
    placed = place_positions(stack, reads_prompts=False)
    spec = TransformerEncoderSpec(len(stack.layers), **_read_layer_style(stack))
    (embeddings,) = spec.embeddings
    spec.position_encodings.encodings = placed.table.numpy()
    _set_stack(stack, spec, embeddings, placed)
    for layer_spec, layer in zip(spec.layer, stack.layers):
        set_transformer_encoder_layer(layer_spec, layer)
    return spec


def _build_decoder(trained: OpenModel) -> TransformerDecoderSpec:
    stack = trained.stacks["decoder"]
    placed = place_positions(stack, reads_prompts=not trained.translates)
    spec = TransformerDecoderSpec(
        len(stack.layers),
        with_encoder_attention=trained.translates,
        alibi=placed.alibi,
        **_read_layer_style(stack),
    )
    if not placed.alibi:
        spec.position_encodings.encodings = placed.table.numpy()
    _set_stack(stack, spec, spec.embeddings, placed)
    for layer_spec, layer in zip(spec.layer, stack.layers):
        set_transformer_decoder_layer(layer_spec, layer, with_encoder_attention=trained.translates)
    set_linear(spec.projection, stack.output_projection)
    return spec


def _read_layer_style(stack: Any) -> dict[str, Any]:
    """Read heads, norms and activation of the layers, as arguments of CTranslate2's stacks."""
    activation = str(stack.cfg.activation_fn)
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"--to ctranslate2: the activation {activation} is not one of CTranslate2's: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return {
        "num_heads": stack.layers[0].self_attn.num_heads,
        "pre_norm": stack.layers[0].normalize_before,
        "no_final_norm": stack.layer_norm is None,
        "activation": _ACTIVATIONS[activation],
        "layernorm_embedding": stack.layernorm_embedding is not None,
    }


def _set_stack(stack: Any, spec: Any, embeddings: LayerSpec, placed: PlacedPositions) -> None:
    """Set the parts of a specification that encoder and decoder have in common.

    The weights of the layers must be set afterwards: here each layer gets another specification of
    its attention, which has fields for the layer's positions.
    """
    set_embeddings(embeddings, stack.embed_tokens)
    spec.scale_embeddings = float(stack.embed_scale)
    if stack.layer_norm is not None:
        set_layer_norm(spec.layer_norm, stack.layer_norm)
    if stack.layernorm_embedding is not None:
        set_layer_norm(spec.layernorm_embedding, stack.layernorm_embedding)
    for layer, attention in zip(spec.layer, placed.attention):
        layer.self_attention = attention
