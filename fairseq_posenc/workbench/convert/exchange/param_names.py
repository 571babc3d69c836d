"""Lists parameter names and layer settings of transformers' model classes, without positions.

A map has beginnings of names, such as ``"decoder.layer_norm.": "gpt_neox.final_layer_norm."``, with
``{}`` for the index of a layer; the first that fits is used.
The maps of position parameters stand in ``encoding_maps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Names = dict[str, str]  # beginnings of names: of our exports -> of transformers


class LayerStyle(NamedTuple):
    """The description in config.json of the layers of several model classes."""

    stack: str  # `encoder_stack` or `decoder_stack`
    sizes: Mapping[str, str]  # fields of a `StackConfig`, and their names in config.json
    required: Mapping[str, Any]  # fields of a `StackConfig` that must have these values
    config: Mapping[str, Any]  # settings of config.json that make it fairseq's Transformer


EPSILON = 1e-5  # epsilon of fairseq's layer norms
_COMMON_SIZES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
_PRE_NORM = {
    "embedding_norm": False,
    "norm_before": True,
    "final_norm": True,
    "activation_dropout": 0.0,
}
_UNTIED = {"tie_word_embeddings": False}  # see `Layout.scaled_embeddings`
_BERT_STYLE = LayerStyle(
    stack="encoder_stack",
    sizes={
        **_COMMON_SIZES,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    required={
        "embedding_norm": True,
        "norm_before": False,
        "final_norm": False,
        "embed_scale": 1.0,
        "activation_dropout": 0.0,
    },
    config={"layer_norm_eps": EPSILON},
)
_OPT_STYLE = LayerStyle(
    stack="decoder_stack",
    sizes={
        **_COMMON_SIZES,
        "ffn_dim": "ffn_dim",
        "activation": "activation_function",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    required=_PRE_NORM,
    config={"do_layer_norm_before": True, **_UNTIED},
)
_GPT_NEOX_STYLE = LayerStyle(
    stack="decoder_stack",
    sizes={
        **_COMMON_SIZES,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    required=_PRE_NORM,
    config={"layer_norm_eps": EPSILON, "use_parallel_residual": False, **_UNTIED},
)


class Layout(NamedTuple):
    """Model classes that differ only in their heads."""

    model_type: str  # in config.json
    heads: dict[str, str]  # head, such as `masked_lm` -> class
    names: Names
    activations: Mapping[str, str] = {}  # head -> activation, if it is fixed
    style: LayerStyle = _BERT_STYLE
    token_types: str = ""  # name of the table of token types, a row of zeros, if there is one
    # name of the input embeddings, if they are stored multiplied by `embed_scale`, and so cannot be
    # tied to the output embeddings
    scaled_embeddings: str = ""


def _name_bert_layers(
    model: str,
    projections: Sequence[str] = ("self.query", "self.key", "self.value"),
    out: str = "output.dense",
    norm: str = "output.LayerNorm",
) -> Names:
    """Name embeddings and layers of a class derived from BERT, in its attribute ``model``.

    ``projections``, ``out`` and ``norm`` are modules of its attention.
    """
    query, key, value = projections
    attention = f"{model}.encoder.layer.{{}}.attention"
    return {
        "encoder.embed_tokens.": f"{model}.embeddings.word_embeddings.",
        "encoder.layernorm_embedding.": f"{model}.embeddings.LayerNorm.",
        "encoder.layers.{}.self_attn.q_proj.": f"{attention}.{query}.",
        "encoder.layers.{}.self_attn.k_proj.": f"{attention}.{key}.",
        "encoder.layers.{}.self_attn.v_proj.": f"{attention}.{value}.",
        "encoder.layers.{}.self_attn.out_proj.": f"{attention}.{out}.",
        "encoder.layers.{}.self_attn_layer_norm.": f"{attention}.{norm}.",
        "encoder.layers.{}.fc1.": f"{model}.encoder.layer.{{}}.intermediate.dense.",
        "encoder.layers.{}.fc2.": f"{model}.encoder.layer.{{}}.output.dense.",
        "encoder.layers.{}.final_layer_norm.": f"{model}.encoder.layer.{{}}.output.LayerNorm.",
    }


_ROBERTA = {
    **_name_bert_layers("roberta"),
    "lm_head.": "lm_head.",
    "classifier.": "classifier.",
    "span_head.scores.": "qa_outputs.",
}
_TYPES = "{}.embeddings.token_type_embeddings.weight"


def _build_roberta(model_type: str, name: str) -> Layout:
    """Build the layout of RoBERTa or a class derived from it."""
    heads = {
        "masked_lm": f"{name}ForMaskedLM",
        "classes": f"{name}ForSequenceClassification",
        "spans": f"{name}ForQuestionAnswering",
    }
    activations = {"masked_lm": "gelu", "classes": "tanh"}
    return Layout(model_type, heads, _ROBERTA, activations, token_types=_TYPES.format("roberta"))


_BERT_HEAD = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.bias": "cls.predictions.bias",
}
_ROFORMER = {**_name_bert_layers("roformer"), **_BERT_HEAD}
_DEBERTA = {
    **_name_bert_layers("deberta", ("self.query_proj", "self.key_proj", "self.value_proj")),
    **_BERT_HEAD,
}
_MPNET = {
    **_name_bert_layers("mpnet", ("attn.q", "attn.k", "attn.v"), "attn.o", "LayerNorm"),
    "lm_head.": "lm_head.",
}
_NEOX_ATTENTION = "gpt_neox.layers.{}.attention"
_GPT_NEOX_NAMES = {
    "decoder.embed_tokens.": "embed_out.",
    "decoder.layer_norm.": "gpt_neox.final_layer_norm.",
    # `hf_mapping.join_query_key_value` makes one tensor of these three.
    "decoder.layers.{}.self_attn.q_proj.": f"{_NEOX_ATTENTION}.query_key_value.q.",
    "decoder.layers.{}.self_attn.k_proj.": f"{_NEOX_ATTENTION}.query_key_value.k.",
    "decoder.layers.{}.self_attn.v_proj.": f"{_NEOX_ATTENTION}.query_key_value.v.",
    "decoder.layers.{}.self_attn.out_proj.": f"{_NEOX_ATTENTION}.dense.",
    "decoder.layers.{}.self_attn_layer_norm.": "gpt_neox.layers.{}.input_layernorm.",
    "decoder.layers.{}.final_layer_norm.": "gpt_neox.layers.{}.post_attention_layernorm.",
    "decoder.layers.{}.fc1.": "gpt_neox.layers.{}.mlp.dense_h_to_4h.",
    "decoder.layers.{}.fc2.": "gpt_neox.layers.{}.mlp.dense_4h_to_h.",
}
_OPT_NAMES = {
    "decoder.embed_tokens.": "lm_head.",
    "decoder.layer_norm.": "model.decoder.final_layer_norm.",
    "decoder.": "model.decoder.",
}

# `HFClass.model` -> layout of this class.
LAYOUTS = {
    "RobertaForMaskedLM": _build_roberta("roberta", "Roberta"),
    "XLMRobertaForMaskedLM": _build_roberta("xlm-roberta", "XLMRoberta"),
    "RoFormerForMaskedLM": Layout(
        "roformer",
        {"masked_lm": "RoFormerForMaskedLM"},
        _ROFORMER,
        token_types=_TYPES.format("roformer"),
    ),
    "DebertaV2ForMaskedLM": Layout("deberta-v2", {"masked_lm": "DebertaV2ForMaskedLM"}, _DEBERTA),
    "OPTForCausalLM": Layout(
        "opt",
        {"causal_lm": "OPTForCausalLM"},
        _OPT_NAMES,
        style=_OPT_STYLE,
        scaled_embeddings="model.decoder.embed_tokens.weight",
    ),
    "GPTNeoXForCausalLM": Layout(
        "gpt_neox",
        {"causal_lm": "GPTNeoXForCausalLM"},
        _GPT_NEOX_NAMES,
        style=_GPT_NEOX_STYLE,
        scaled_embeddings="gpt_neox.embed_in.weight",
    ),
    "MPNetForMaskedLM": Layout(
        "mpnet", {"masked_lm": "MPNetForMaskedLM"}, _MPNET, {"masked_lm": "gelu"}
    ),
}
