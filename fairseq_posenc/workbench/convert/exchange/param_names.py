"""Layers and parameter names of the model classes of transformers, positions apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Names = tuple[tuple[str, str], ...]


class LayerStyle(NamedTuple):
    """What a family of model classes calls the settings of its layers, and which it must have."""

    stack: str  # `encoder_stack` or `decoder_stack`
    sizes: Mapping[str, str]  # fields of a `StackConfig`, and what they are called there
    fields: Mapping[str, Any]  # those that must have a value
    config: Mapping[str, Any]  # settings that make it what fairseq's Transformer is


EPSILON = 1e-5  # of fairseq's layer norms
_COMMON = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
BERT = LayerStyle(
    "encoder_stack",
    {
        **_COMMON,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    {
        "embedding_norm": True,
        "norm_before": False,
        "final_norm": False,
        "embed_scale": 1.0,
        "activation_dropout": 0.0,
    },
    {"layer_norm_eps": EPSILON},
)
OPT = LayerStyle(
    "decoder_stack",
    {
        **_COMMON,
        "ffn_dim": "ffn_dim",
        "activation": "activation_function",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    {"embedding_norm": False, "norm_before": True, "final_norm": True, "activation_dropout": 0.0},
    {"do_layer_norm_before": True, "tie_word_embeddings": False},
)
GPT_NEOX = LayerStyle(
    "decoder_stack",
    {
        **_COMMON,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    OPT.fields,
    {
        "layer_norm_eps": EPSILON,
        "use_parallel_residual": False,
        "tie_word_embeddings": False,
    },
)


class Layout(NamedTuple):
    """A family of model classes."""

    model_type: str  # as config.json has it
    heads: dict[str, str]  # the class for each head (see `ARCHITECTURES`)
    names: Names  # beginnings of names, ours and theirs, with `{}` for the number of the layer
    # those that heads of theirs have, whatever the layers have
    activations: Mapping[str, str] = MappingProxyType({})
    style: LayerStyle = BERT  # of the layers
    types: str = ""  # name of a table of token types, which are all one type: zeros
    # name of the input embeddings with their factor, where those of the output have none
    scaled: str = ""


def _layers(prefix: str, projections: str, out: str, norm: str) -> Names:
    """Name BERT's embeddings and layers in one of its descendants."""
    layer, there = "encoder.layers.{}.", f"{prefix}.encoder.layer.{{}}."
    pairs = [
        ("encoder.embed_tokens.", f"{prefix}.embeddings.word_embeddings."),
        ("encoder.layernorm_embedding.", f"{prefix}.embeddings.LayerNorm."),
        *(
            (f"{layer}self_attn.{name[0]}_proj.", f"{there}attention.{projections.format(name)}.")
            for name in ("query", "key", "value")
        ),
        (f"{layer}self_attn.out_proj.", f"{there}attention.{out}."),
        (f"{layer}self_attn_layer_norm.", f"{there}attention.{norm}."),
        (f"{layer}fc1.", f"{there}intermediate.dense."),
        (f"{layer}fc2.", f"{there}output.dense."),
        (f"{layer}final_layer_norm.", f"{there}output.LayerNorm."),
    ]
    return tuple(pairs)


_ROBERTA = (
    *_layers("roberta", "self.{}", "output.dense", "output.LayerNorm"),
    ("lm_head.", "lm_head."),
    ("classifier.", "classifier."),
    ("span_head.scores.", "qa_outputs."),
)
_TYPES = "{}.embeddings.token_type_embeddings.weight"


def _roberta(model_type: str, name: str) -> Layout:
    heads = {
        "masked_lm": f"{name}ForMaskedLM",
        "classes": f"{name}ForSequenceClassification",
        "spans": f"{name}ForQuestionAnswering",
    }
    activations = {"masked_lm": "gelu", "classes": "tanh"}
    types = _TYPES.format("roberta")
    return Layout(model_type, heads, _ROBERTA, activations, types=types)


def _bert(model_type: str, name: str, layers: Names, types: str = "") -> Layout:
    """Build the layout of a model whose head for masked tokens is BERT's."""
    head = "cls.predictions."
    names = (
        *layers,
        ("lm_head.dense.", f"{head}transform.dense."),
        ("lm_head.layer_norm.", f"{head}transform.LayerNorm."),
        ("lm_head.bias", f"{head}bias"),
    )
    return Layout(model_type, {"masked_lm": name}, names, types=types)


_MPNET = (
    *_layers("mpnet", "attn.{0[0]}", "attn.o", "LayerNorm"),
    ("lm_head.", "lm_head."),
)
_GPT_NEOX = (
    ("decoder.embed_tokens.", "embed_out."),
    ("decoder.layer_norm.", "gpt_neox.final_layer_norm."),
    *(
        (f"decoder.layers.{{}}.{ours}.", f"gpt_neox.layers.{{}}.{theirs}.")
        for ours, theirs in (
            *((f"self_attn.{part}_proj", f"attention.query_key_value.{part}") for part in "qkv"),
            ("self_attn.out_proj", "attention.dense"),
            ("self_attn_layer_norm", "input_layernorm"),
            ("final_layer_norm", "post_attention_layernorm"),
            ("fc1", "mlp.dense_h_to_4h"),
            ("fc2", "mlp.dense_4h_to_h"),
        )
    ),
)
_OPT = (
    ("decoder.embed_tokens.", "lm_head."),
    ("decoder.layer_norm.", "model.decoder.final_layer_norm."),
    ("decoder.", "model.decoder."),
)

# By the class that says in an encoding's file that its positions are theirs.
LAYOUTS = {
    "RobertaForMaskedLM": _roberta("roberta", "Roberta"),
    "XLMRobertaForMaskedLM": _roberta("xlm-roberta", "XLMRoberta"),
    "RoFormerForMaskedLM": _bert(
        "roformer",
        "RoFormerForMaskedLM",
        _layers("roformer", "self.{}", "output.dense", "output.LayerNorm"),
        _TYPES.format("roformer"),
    ),
    "DebertaV2ForMaskedLM": _bert(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        _layers("deberta", "self.{}_proj", "output.dense", "output.LayerNorm"),
    ),
    "OPTForCausalLM": Layout(
        "opt",
        {"causal_lm": "OPTForCausalLM"},
        _OPT,
        style=OPT,
        scaled="model.decoder.embed_tokens.weight",
    ),
    "GPTNeoXForCausalLM": Layout(
        "gpt_neox",
        {"causal_lm": "GPTNeoXForCausalLM"},
        _GPT_NEOX,
        style=GPT_NEOX,
        scaled="gpt_neox.embed_in.weight",
    ),
    "MPNetForMaskedLM": Layout(
        "mpnet", {"masked_lm": "MPNetForMaskedLM"}, _MPNET, {"masked_lm": "gelu"}
    ),
}
