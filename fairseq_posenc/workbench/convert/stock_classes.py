"""Lists the classes of transformers that compute fairseq's models, with the names of their parts.

A Transformer of fairseq is a known class of transformers, apart from its positions: a post-norm
RoBERTa is ``RobertaForMaskedLM``. The tables pair fairseq's names with those of the class:
``export`` reads them from left to right, ``import`` from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError

EPSILON = 1e-5  # of fairseq's layer norms
UNUSED_ROWS = 2  # rows of RoBERTa's table of positions before that of position 0
TOKEN_TYPES = "token_type_embeddings.weight"  # end of the name of a table that fairseq lacks

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
        own_positions: spec of the positions that the class itself computes as fairseq does; empty
            where it has others, or counts padding as tokens.
    """

    family: str
    model_type: str
    classes: Mapping[str, str]
    computes: Mapping[str, bool]
    parts: Mapping[str, str]
    options: Mapping[str, str]
    own_positions: str = ""

    def pair_weights(
        self, weights: Mapping[str, Tensor], model: PreTrainedModel, path: Path
    ) -> list[tuple[Tensor, Tensor]]:
        """Pair each weight of fairseq with the parameter of transformers that stands for it.

        Args:
            weights: fairseq's weights by name.
            model: a model of one of the classes.
            path: the model that is converted, for messages.

        Raises:
            UserError: a weight or a parameter stands alone, or their shapes differ.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        class_name = type(model).__name__
        pairs = []
        for name, weight in weights.items():
            parameter = parameters.get(self.find_name(name))
            if parameter is None:
                raise UserError(f"{path}: no class of transformers has {name}")
            if parameter.shape != weight.shape:
                raise UserError(
                    f"{path}: {name} has the shape {tuple(weight.shape)} in fairseq, and in "
                    f"{class_name} {tuple(parameter.shape)}: that has one width and one number of "
                    "positions for encoder and decoder"
                )
            pairs.append((weight, parameter))
        paired = {id(parameter) for _, parameter in pairs}
        for name, parameter in parameters.items():
            is_unread = name in COPIES or name.endswith(TOKEN_TYPES)
            if not (id(parameter) in paired or is_unread):
                raise UserError(f"{path}: fairseq's model lacks {name}, which {class_name} has")
        return pairs

    def find_name(self, name: str) -> str:
        """Find the class's name of a parameter of fairseq; "" if the class has no such part.

        >>> ROBERTA.find_name("encoder.sentence_encoder.layers.3.self_attn.q_proj.weight")
        'roberta.encoder.layer.3.attention.self.query.weight'
        """
        for fairseq_part, part in self.parts.items():
            pattern = re.escape(fairseq_part).replace(r"\{\}", r"(\d+)")
            if match := re.match(rf"{pattern}(?=\.|$)", name):
                return part.format(*match.groups()) + name[match.end() :]
        return ""


def _name_positions(stack: str, hf_stack: str, hf_attention: str) -> dict[str, str]:
    """Name the positions of a stack, which ``set_positions`` puts into it and its attentions."""
    return {
        f"{stack}.embed_positions.encodings": f"{hf_stack}.positions.input",
        f"{stack}.encodings": f"{hf_stack}.positions.shared",
        f"{stack}.layers.{{}}.self_attn.encodings": f"{hf_attention}.positions.encodings",
    }


def _name_bert_parts(base: str, attention_norm: str, feedforward_norm: str) -> dict[str, str]:
    """Name the parts of a class derived from BERT; ``base`` is its attribute with the stack."""
    stack, layer = "encoder.sentence_encoder", f"{base}.encoder.layer.{{}}"
    return {
        **_name_positions(stack, base, f"{layer}.attention.self"),
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
        "encoder.lm_head.weight": "lm_head.decoder.weight",
        "encoder.lm_head.bias": "lm_head.decoder.bias",
        "encoder.lm_head": "lm_head",
        "classification_heads.sentence_classification_head": "classifier",
        "span_head.scores": "qa_outputs",
    }


def _name_bert_options(side: str) -> dict[str, str]:
    """Name the options of an ``encoder`` or ``decoder`` in a configuration derived from BERT's."""
    return {
        f"{side}_layers": "num_hidden_layers",
        f"{side}_embed_dim": "hidden_size",
        f"{side}_ffn_embed_dim": "intermediate_size",
        f"{side}_attention_heads": "num_attention_heads",
        "activation_fn": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
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
    options=_name_bert_options("encoder"),
    own_positions="learned",
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
)
XLM_ROBERTA = replace(  # the same model under another name
    ROBERTA,
    model_type="xlm-roberta",
    classes={head: f"XLM{name}" for head, name in ROBERTA.classes.items()},
)
# The classes of causal LMs and translation were ported from fairseq: their parts have its names.
BIOGPT = StockFamily(
    family="causal_lm",
    model_type="biogpt",
    classes={"causal_lm": "BioGptForCausalLM"},
    computes={"decoder_normalize_before": True, "layernorm_embedding": False},
    parts={
        **_name_positions("decoder", "biogpt", "biogpt.layers.{}.self_attn"),
        "decoder.output_projection": "output_projection",
        "decoder": "biogpt",
    },
    options={
        **_name_bert_options("decoder"),
        "activation_dropout": "activation_dropout",
        "decoder_layerdrop": "layerdrop",
    },
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
        **_name_positions("encoder", "model.encoder", "model.encoder.layers.{}.self_attn"),
        **_name_positions("decoder", "model.decoder", "model.decoder.layers.{}.self_attn"),
        "decoder.output_projection": "lm_head",
        "encoder": "model.encoder",
        "decoder": "model.decoder",
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
    M2M_100,
    model_type="mbart",
    classes={"translation": "MBartForConditionalGeneration"},
    computes={**M2M_100.computes, "layernorm_embedding": True},
    own_positions="",
)
# Parameters that the classes have and do not read, or not if another parameter stands for them.
COPIES = {
    "lm_head.bias": "lm_head.decoder.bias",
    "model.shared.weight": "model.encoder.embed_tokens.weight",
}
# The first that computes a model is the one that it is exported to.
STOCK_FAMILIES = (ROBERTA, ROBERTA_PRE_NORM, XLM_ROBERTA, BIOGPT, MARIAN, M2M_100, BART, MBART)
