"""Lists the classes of transformers that compute fairseq's models, with the names of their parts.

A Transformer of fairseq is a known class of transformers, apart from its positions: a post-norm
RoBERTa is ``RobertaForMaskedLM``. The tables pair fairseq's names with those of the class:
``export`` reads them from left to right, ``import`` from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

EPSILON = 1e-5  # of fairseq's layer norms
UNUSED_ROWS = 2  # rows of RoBERTa's table of positions before that of position 0

# fairseq's names of activations -> names in transformers, where they differ.
ACTIVATIONS = {
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "relu_squared": "relu2",
    "swish": "silu",
}


@dataclass(frozen=True)
class StockFamily:
    """Classes of transformers that differ only in their heads, and their names for fairseq's parts.

    Attributes:
        family: fairseq's family: ``masked_lm``, ``causal_lm`` or ``translation``.
        model_type: the type in config.json.
        classes: for each head of a fairseq model, the class that has it.
        computes: options of fairseq with the values that the class stands for.
        parts: fairseq's name of a part -> its name in the class; ``{}`` is the number of a layer.
            The first name that fits is used, and parts of a part keep their names.
        options: option of fairseq -> field of config.json with the same value.
        fields: other fields of config.json, without which the class would compute something else.
        own_positions: spec of the positions that the class itself computes as fairseq does; empty
            where it has others, or counts padding as tokens.
        own_table: name of its table of learned positions.
    """

    family: str
    model_type: str
    classes: Mapping[str, str]
    computes: Mapping[str, Any]
    parts: Mapping[str, str]
    options: Mapping[str, str]
    fields: Mapping[str, Any]
    own_positions: str = ""
    own_table: str = ""

    def find_name(self, name: str) -> str | None:
        """Find the class's name of a parameter of fairseq; None if the class has no such part.

        >>> ROBERTA.find_name("encoder.sentence_encoder.layers.3.self_attn.q_proj.weight")
        'roberta.encoder.layer.3.attention.self.query.weight'
        """
        for fairseq_part, part in self.parts.items():
            pattern = re.escape(fairseq_part).replace(r"\{\}", r"(\d+)")
            if match := re.match(rf"{pattern}(?=\.|$)", name):
                return part.format(*match.groups()) + name[match.end() :]
        return None


def _name_bert_parts(base: str, attention_norm: str, feedforward_norm: str) -> dict[str, str]:
    """Name the parts of a class derived from BERT; ``base`` is its attribute with the stack."""
    stack, layer = "encoder.sentence_encoder", f"{base}.encoder.layer.{{}}"
    return {
        f"{stack}.embed_tokens": f"{base}.embeddings.word_embeddings",
        f"{stack}.layernorm_embedding": f"{base}.embeddings.LayerNorm",
        f"{stack}.layer_norm": f"{base}.LayerNorm",  # pre-norm models alone have it
        f"{stack}.layers.{{}}.self_attn.q_proj": f"{layer}.attention.self.query",
        f"{stack}.layers.{{}}.self_attn.k_proj": f"{layer}.attention.self.key",
        f"{stack}.layers.{{}}.self_attn.v_proj": f"{layer}.attention.self.value",
        f"{stack}.layers.{{}}.self_attn.out_proj": f"{layer}.attention.output.dense",
        f"{stack}.layers.{{}}.self_attn_layer_norm": f"{layer}.{attention_norm}.LayerNorm",
        f"{stack}.layers.{{}}.fc1": f"{layer}.intermediate.dense",
        f"{stack}.layers.{{}}.fc2": f"{layer}.output.dense",
        f"{stack}.layers.{{}}.final_layer_norm": f"{layer}.{feedforward_norm}.LayerNorm",
        **_name_positions(stack, base, f"{layer}.attention.self"),
        "encoder.lm_head.weight": "lm_head.decoder.weight",
        "encoder.lm_head.bias": "lm_head.decoder.bias",
        "encoder.lm_head": "lm_head",
        "classification_heads.sentence_classification_head": "classifier",
        "span_head.scores": "qa_outputs",
    }


def _name_positions(stack: str, hf_stack: str, hf_attention: str) -> dict[str, str]:
    """Name the positions of a stack, which ``set_positions`` puts into it and its attentions."""
    return {
        f"{stack}.embed_positions.encodings": f"{hf_stack}.positions.input",
        f"{stack}.encodings": f"{hf_stack}.positions.shared",
        f"{stack}.layers.{{}}.self_attn.encodings": f"{hf_attention}.positions.encodings",
    }


def _name_decoder_parts(stack: str, hf_stack: str) -> dict[str, str]:
    """Name the parts of a stack of a class that was ported from fairseq, with fairseq's names."""
    parts = ("q_proj", "k_proj", "v_proj", "out_proj")
    in_layer = [
        *(f"{kind}_attn.{part}" for kind in ("self", "encoder") for part in parts),
        *("self_attn_layer_norm", "encoder_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
    ]
    names = ["embed_tokens", "layernorm_embedding", "layer_norm"]
    names += [f"layers.{{}}.{part}" for part in in_layer]
    return {
        **{f"{stack}.{name}": f"{hf_stack}.{name}" for name in names},
        **_name_positions(stack, hf_stack, f"{hf_stack}.layers.{{}}.self_attn"),
    }


ROBERTA = StockFamily(
    family="masked_lm",
    model_type="roberta",
    classes={
        "masked_lm": "RobertaForMaskedLM",
        "classes": "RobertaForSequenceClassification",
        "spans": "RobertaForQuestionAnswering",
    },
    computes={"encoder_normalize_before": False, "layernorm_embedding": True},
    parts=_name_bert_parts("roberta", "attention.output", "output"),
    options={
        "encoder_layers": "num_hidden_layers",
        "encoder_embed_dim": "hidden_size",
        "encoder_ffn_embed_dim": "intermediate_size",
        "encoder_attention_heads": "num_attention_heads",
        "activation_fn": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    fields={"layer_norm_eps": EPSILON, "type_vocab_size": 1},
    own_positions="learned",
    own_table="roberta.embeddings.position_embeddings.weight",
)
ROBERTA_PRE_NORM = replace(
    ROBERTA,
    model_type="roberta-prelayernorm",
    classes={
        head: name.replace("Roberta", "RobertaPreLayerNorm")
        for head, name in ROBERTA.classes.items()
    },
    computes={"encoder_normalize_before": True, "layernorm_embedding": True},
    parts=_name_bert_parts("roberta_prelayernorm", "attention", "intermediate"),
    own_table="roberta_prelayernorm.embeddings.position_embeddings.weight",
)
XLM_ROBERTA = replace(  # the same model under another name
    ROBERTA,
    model_type="xlm-roberta",
    classes={head: f"XLM{name}" for head, name in ROBERTA.classes.items()},
)
BIOGPT = StockFamily(
    family="causal_lm",
    model_type="biogpt",
    classes={"causal_lm": "BioGptForCausalLM"},
    computes={"decoder_normalize_before": True, "layernorm_embedding": False},
    parts={
        **_name_decoder_parts("decoder", "biogpt"),
        "decoder.output_projection": "output_projection",
    },
    options={
        "decoder_layers": "num_hidden_layers",
        "decoder_embed_dim": "hidden_size",
        "decoder_ffn_embed_dim": "intermediate_size",
        "decoder_attention_heads": "num_attention_heads",
        "activation_fn": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "activation_dropout": "activation_dropout",
        "decoder_layerdrop": "layerdrop",
    },
    fields={"layer_norm_eps": EPSILON},
)
MARIAN = StockFamily(
    family="translation",
    model_type="marian",
    classes={"translation": "MarianMTModel"},
    computes={
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
        "layernorm_embedding": False,
    },
    parts={
        **_name_decoder_parts("encoder", "model.encoder"),
        **_name_decoder_parts("decoder", "model.decoder"),
        "decoder.output_projection": "lm_head",
    },
    options={
        "encoder_layers": "encoder_layers",
        "decoder_layers": "decoder_layers",
        "encoder_embed_dim": "d_model",
        "decoder_embed_dim": "d_model",
        "encoder_ffn_embed_dim": "encoder_ffn_dim",
        "decoder_ffn_embed_dim": "decoder_ffn_dim",
        "encoder_attention_heads": "encoder_attention_heads",
        "decoder_attention_heads": "decoder_attention_heads",
        "activation_fn": "activation_function",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "activation_dropout",
        "encoder_layerdrop": "encoder_layerdrop",
        "decoder_layerdrop": "decoder_layerdrop",
    },
    fields={},
)
M2M_100 = replace(
    MARIAN,
    model_type="m2m_100",
    classes={"translation": "M2M100ForConditionalGeneration"},
    computes={
        "encoder_normalize_before": True,
        "decoder_normalize_before": True,
        "layernorm_embedding": False,
    },
    own_positions="sinusoidal(layout=fairseq)",
)
BART = replace(
    MARIAN,
    model_type="bart",
    classes={"translation": "BartForConditionalGeneration"},
    computes={**MARIAN.computes, "layernorm_embedding": True},
)
MBART = replace(
    BART,
    model_type="mbart",
    classes={"translation": "MBartForConditionalGeneration"},
    computes={**M2M_100.computes, "layernorm_embedding": True},
)
# Parameters that the classes have and do not read, or not if another parameter stands for them.
COPIES = {
    "lm_head.bias": "lm_head.decoder.bias",
    "model.shared.weight": "model.encoder.embed_tokens.weight",
}
# The first that computes a model is the one that it is exported to.
STOCK_FAMILIES = (ROBERTA, ROBERTA_PRE_NORM, XLM_ROBERTA, BIOGPT, MARIAN, M2M_100, BART, MBART)
