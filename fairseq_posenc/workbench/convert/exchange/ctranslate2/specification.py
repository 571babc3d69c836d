"""Builds CTranslate2's specification of a model: layers and weights."""

from __future__ import annotations

from typing import Any

import numpy
from ctranslate2.converters.utils import fuse_linear
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from ctranslate2.specs.common_spec import Activation, LayerNormSpec, LinearSpec
from ctranslate2.specs.model_spec import LayerSpec, ModelSpec
from ctranslate2.specs.transformer_spec import (
    TransformerDecoderModelSpec,
    TransformerDecoderSpec,
    TransformerEncoderSpec,
    TransformerSpec,
)
from torch import Tensor

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


class _Weights:
    """The weights of a model without positions; each must be taken once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.left = {
            name: weight for name, weight in tensors.items() if not is_position_parameter(name)
        }

    def take(self, name: str) -> numpy.ndarray:
        """Take a weight by fairseq's name."""
        if name not in self.left:
            raise UserError(f"--to ctranslate2: the model has no {name}, which CTranslate2 needs")
        taken: numpy.ndarray = self.left.pop(name).numpy().copy()  # quantized in place
        return taken

    def take_linear(self, name: str) -> LinearSpec:
        """Take the weights of a linear layer, with its bias if it has one."""
        spec = LinearSpec()
        spec.weight = self.take(f"{name}.weight")
        if f"{name}.bias" in self.left:
            spec.bias = self.take(f"{name}.bias")
        return spec

    def take_norm(self, spec: LayerNormSpec, name: str) -> None:
        """Take the weights of a layer norm."""
        spec.gamma, spec.beta = self.take(f"{name}.weight"), self.take(f"{name}.bias")

    def check_none_left(self) -> None:
        """Refuse a model with weights that were not taken."""
        if self.left:
            raise UserError(
                f"--to ctranslate2: CTranslate2 has no place for {next(iter(self.left))}"
                + (f" and {len(self.left) - 1} other weights" if len(self.left) > 1 else "")
            )


def build_specification(trained: OpenModel, vocabularies: list[list[str]]) -> ModelSpec:
    """Build the specification of a model, checked and in float32.

    Args:
        trained: the model.
        vocabularies: symbols of each dictionary, in order.

    Raises:
        UserError: the model has something that CTranslate2 does not support.
    """
    weights = _Weights(trained.weights)
    decoder = _build_decoder(weights, trained)
    if trained.family.name == "translation":
        spec: Any = TransformerSpec(_build_encoder(weights, trained.stacks["encoder"]), decoder)
        spec.register_source_vocabulary(vocabularies[0])
        spec.register_target_vocabulary(vocabularies[-1])
        spec.config.decoder_start_token = spec.config.eos_token
        spec.config.add_source_eos = True
    else:
        spec = TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocabularies[0])
        if not trained.settings.task.get("add_bos_token"):
            spec.config.bos_token = spec.config.eos_token
    weights.check_none_left()
    spec.validate()
    return spec


def _build_encoder(weights: _Weights, stack: Any) -> TransformerEncoderSpec:
    placed = place_positions(stack, reads_prompts=False)
    spec = TransformerEncoderSpec(len(stack.layers), **_read_layer_style(stack))
    (embeddings,) = spec.embeddings
    spec.position_encodings.encodings = placed.table.numpy()
    _set_stack(weights, "encoder", stack, spec, embeddings, placed)
    return spec


def _build_decoder(weights: _Weights, trained: OpenModel) -> TransformerDecoderSpec:
    stack, translates = trained.stacks["decoder"], trained.family.name == "translation"
    placed = place_positions(stack, reads_prompts=not translates)
    spec = TransformerDecoderSpec(
        len(stack.layers),
        with_encoder_attention=translates,
        alibi=placed.alibi,
        **_read_layer_style(stack),
    )
    if not placed.alibi:
        spec.position_encodings.encodings = placed.table.numpy()
    _set_stack(weights, "decoder", stack, spec, spec.embeddings, placed)
    if translates:
        for index, layer in enumerate(spec.layer):
            name = f"decoder.layers.{index}.encoder_attn"
            _set_attention(weights, layer.attention, name, self_attention=False)
    spec.projection = weights.take_linear("decoder.output_projection")
    return spec


def _read_layer_style(stack: Any) -> dict[str, Any]:
    """Build the arguments of CTranslate2's stack: heads, norms and activation of the layers."""
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


def _set_stack(
    weights: _Weights,
    name: str,
    stack: Any,
    spec: Any,
    embeddings: LayerSpec,
    placed: PlacedPositions,
) -> None:
    """Set the parts of a specification that encoder and decoder have in common."""
    embeddings.weight = weights.take(f"{name}.embed_tokens.weight")
    spec.scale_embeddings = float(stack.embed_scale)
    if stack.layer_norm is not None:
        weights.take_norm(spec.layer_norm, f"{name}.layer_norm")
    if stack.layernorm_embedding is not None:
        weights.take_norm(spec.layernorm_embedding, f"{name}.layernorm_embedding")
    for index, (layer, attention) in enumerate(zip(spec.layer, placed.attention)):
        layer.self_attention = attention
        _set_attention(weights, attention, f"{name}.layers.{index}.self_attn", self_attention=True)
        layer.ffn.linear_0 = weights.take_linear(f"{name}.layers.{index}.fc1")
        layer.ffn.linear_1 = weights.take_linear(f"{name}.layers.{index}.fc2")
        weights.take_norm(layer.ffn.layer_norm, f"{name}.layers.{index}.final_layer_norm")


def _set_attention(
    weights: _Weights, spec: MultiHeadAttentionSpec, name: str, *, self_attention: bool
) -> None:
    """Set the projections of an attention and the layer norm of its block."""
    query, key, value = (weights.take_linear(f"{name}.{letter}_proj") for letter in "qkv")
    if self_attention:
        fuse_linear(spec.linear[0], [query, key, value])
    else:
        spec.linear[0] = query
        fuse_linear(spec.linear[1], [key, value])
    spec.linear[-1] = weights.take_linear(f"{name}.out_proj")
    weights.take_norm(spec.layer_norm, f"{name}_layer_norm")
