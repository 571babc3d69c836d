"""Lists parameter names and layer settings of transformers' model classes, without positions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Names = tuple[tuple[str, str], ...]  # pairs of our and transformers' beginnings of names


class LayerStyle(NamedTuple):
    """The description in config.json of the layers of several model classes."""

    stack: str  # `encoder_stack` or `decoder_stack`
    sizes: Mapping[str, str]  # fields of a `StackConfig`, and their names in config.json
    fields: Mapping[str, Any]  # fields of a `StackConfig` that must have these values
    config: Mapping[str, Any]  # settings of config.json that make it fairseq's Transformer


EPSILON = 1e-5  # epsilon of fairseq's layer norms
_COMMON = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}


def _name_sizes(ffn_dim: str, activation: str, dropout: str, attention_dropout: str) -> Any:
    """Map fields of a ``StackConfig`` to their names in config.json."""
    names = {"ffn_dim": ffn_dim, "activation": activation, "dropout": dropout}
    return {**_COMMON, **names, "attention_dropout": attention_dropout}


_PRE_NORM = {
    "embedding_norm": False,
    "norm_before": True,
    "final_norm": True,
    "activation_dropout": 0.0,
}
BERT = LayerStyle(
    "encoder_stack",
    _name_sizes(
        "intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"
    ),
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
    _name_sizes("ffn_dim", "activation_function", "dropout", "attention_dropout"),
    _PRE_NORM,
    {"do_layer_norm_before": True, "tie_word_embeddings": False},
)
GPT_NEOX = LayerStyle(
    "decoder_stack",
    _name_sizes("intermediate_size", "hidden_act", "hidden_dropout", "attention_dropout"),
    _PRE_NORM,
    {"layer_norm_eps": EPSILON, "use_parallel_residual": False, "tie_word_embeddings": False},
)


class Layout(NamedTuple):
    """Model classes that differ only in their heads."""

    model_type: str  # in config.json
    heads: dict[str, str]  # head, such as `masked_lm` -> class
    names: Names  # with `{}` for the index of a layer
    activations: Mapping[str, str] = MappingProxyType({})  # head -> activation, if it is fixed
    style: LayerStyle = BERT
    token_types: str = ""  # name of the table of token types, a row of zeros, if there is one
    # name of the input embeddings, if they are stored multiplied by `embed_scale`, and so cannot be
    # tied to the output embeddings
    scaled_embeddings: str = ""


def _name_bert_layers(prefix: str, projections: str, out: str, norm: str) -> Names:
    """Name embeddings and layers of a class that is derived from BERT."""
    layer = "encoder.layers.{}."
    theirs = f"{prefix}.encoder.layer.{{}}."
    pairs = [
        ("encoder.embed_tokens.", f"{prefix}.embeddings.word_embeddings."),
        ("encoder.layernorm_embedding.", f"{prefix}.embeddings.LayerNorm."),
        *(
            (f"{layer}self_attn.{name[0]}_proj.", f"{theirs}attention.{projections.format(name)}.")
            for name in ("query", "key", "value")
        ),
        (f"{layer}self_attn.out_proj.", f"{theirs}attention.{out}."),
        (f"{layer}self_attn_layer_norm.", f"{theirs}attention.{norm}."),
        (f"{layer}fc1.", f"{theirs}intermediate.dense."),
        (f"{layer}fc2.", f"{theirs}output.dense."),
        (f"{layer}final_layer_norm.", f"{theirs}output.LayerNorm."),
    ]
    return tuple(pairs)


_ROBERTA = (
    *_name_bert_layers("roberta", "self.{}", "output.dense", "output.LayerNorm"),
    ("lm_head.", "lm_head."),
    ("classifier.", "classifier."),
    ("span_head.scores.", "qa_outputs."),
)
_TYPES = "{}.embeddings.token_type_embeddings.weight"


def _build_roberta(model_type: str, name: str) -> Layout:
    tasks = {"masked_lm": "MaskedLM", "classes": "SequenceClassification"}
    tasks["spans"] = "QuestionAnswering"
    heads = {head: f"{name}For{task}" for head, task in tasks.items()}
    activations = {"masked_lm": "gelu", "classes": "tanh"}
    return Layout(model_type, heads, _ROBERTA, activations, token_types=_TYPES.format("roberta"))


def _build_bert(model_type: str, name: str, layers: Names, token_types: str = "") -> Layout:
    """Build the layout of a class with BERT's head for masked tokens."""
    head = "cls.predictions."
    names = (
        *layers,
        ("lm_head.dense.", f"{head}transform.dense."),
        ("lm_head.layer_norm.", f"{head}transform.LayerNorm."),
        ("lm_head.bias", f"{head}bias"),
    )
    return Layout(model_type, {"masked_lm": name}, names, token_types=token_types)


_MPNET = (
    # attn.q, attn.k, attn.v: the first letter of our projections' names
    *_name_bert_layers("mpnet", "attn.{0[0]}", "attn.o", "LayerNorm"),
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

# `HFClass.model` -> layout of this class.
LAYOUTS = {
    "RobertaForMaskedLM": _build_roberta("roberta", "Roberta"),
    "XLMRobertaForMaskedLM": _build_roberta("xlm-roberta", "XLMRoberta"),
    "RoFormerForMaskedLM": _build_bert(
        "roformer",
        "RoFormerForMaskedLM",
        _name_bert_layers("roformer", "self.{}", "output.dense", "output.LayerNorm"),
        _TYPES.format("roformer"),
    ),
    "DebertaV2ForMaskedLM": _build_bert(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        _name_bert_layers("deberta", "self.{}_proj", "output.dense", "output.LayerNorm"),
    ),
    "OPTForCausalLM": Layout(
        "opt",
        {"causal_lm": "OPTForCausalLM"},
        _OPT,
        style=OPT,
        scaled_embeddings="model.decoder.embed_tokens.weight",
    ),
    "GPTNeoXForCausalLM": Layout(
        "gpt_neox",
        {"causal_lm": "GPTNeoXForCausalLM"},
        _GPT_NEOX,
        style=GPT_NEOX,
        scaled_embeddings="gpt_neox.embed_in.weight",
    ),
    "MPNetForMaskedLM": Layout(
        "mpnet", {"masked_lm": "MPNetForMaskedLM"}, _MPNET, {"masked_lm": "gelu"}
    ),
}
