"""Lists the classes of transformers that compute fairseq's models, with the names of their parts.

A Transformer of fairseq is a known class of transformers, apart from its positions: a post-norm
RoBERTa is ``RobertaForMaskedLM``. The tables pair fairseq's names with those of the class:
``export`` reads them from left to right, ``import`` from right to left.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.open_model import OpenModel

EPSILON = 1e-5  # of fairseq's layer norms
UNUSED_ROWS = 2  # rows of RoBERTa's table of positions before the row of position 0
TOKEN_TYPES = "token_type_embeddings.weight"  # end of the name of a table that fairseq lacks

# fairseq's names of activations -> names in transformers, where they differ.
ACTIVATIONS = {
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",  # formerly gelu_fast; imports take the last name
    "relu_squared": "relu2",
    "swish": "silu",
}
# A class's parameters that fairseq lacks -> the class's parameter that each of them repeats.
COPIES = {
    "lm_head.bias": "lm_head.decoder.bias",
    "model.shared.weight": "model.encoder.embed_tokens.weight",
}


class StockFamily(NamedTuple):
    """Classes of transformers that differ only in heads, and their names for fairseq's parts."""

    family: str  # kind of fairseq's model: `masked_lm`, `causal_lm` or `translation`
    classes: Mapping[str, str]  # for each head of a fairseq model, the class that has it
    fixed_options: Mapping[str, bool | str]  # options of fairseq -> their only values in the class
    # fairseq's name of a part -> its name in the class; `*` is the number of a layer. The first
    # name that fits is used, and parts of a part keep their names.
    parts: Mapping[str, str]
    config_fields: Mapping[str, str]  # option of fairseq -> field of config.json with its value
    # Spec whose export keeps the class's own positions; if empty, exports always replace them.
    own_positions: str = ""

    def pair_weights(
        self, weights: Mapping[str, Tensor], model: PreTrainedModel, path: Path
    ) -> list[tuple[Tensor, Tensor]]:
        """Pair each of fairseq's weights with the parameter of the class that has its place.

        Args:
            weights: fairseq's weights by name.
            model: of one of the classes, after ``hf.set_positions``. If it keeps its own positions,
                ``parts`` must also name their table, if there is one.
            path: the model that is converted, for messages.

        Raises:
            UserError: a weight or a parameter has no partner, or their shapes differ.
        """
        # Tied parameters are listed under all of their names, as in fairseq's state dict.
        parameters = dict(model.named_parameters(remove_duplicate=False))
        class_name = type(model).__name__
        pairs = []
        for name, weight in weights.items():
            parameter = parameters.get(self.find_name(name))
            if parameter is None:
                raise UserError(f"{path}: {class_name} of transformers has no {name}")
            if parameter.shape != weight.shape:
                shapes = f"{tuple(weight.shape)}, and in {class_name} {tuple(parameter.shape)}"
                limit = "its stacks have one width, one dictionary and one number of positions"
                raise UserError(f"{path}: {name} has the shape {shapes}; {limit}")
            pairs.append((weight, parameter))
        paired = {id(parameter) for _, parameter in pairs}  # a tied one by any of its names
        for name, parameter in parameters.items():
            if not (id(parameter) in paired or name in COPIES or name.endswith(TOKEN_TYPES)):
                raise UserError(f"{path}: fairseq's model lacks {name}, which {class_name} has")
        return pairs

    def find_name(self, name: str) -> str:
        """Find the class's name of a parameter of fairseq; "" if the class has no such part.

        >>> ROBERTA.find_name("encoder.sentence_encoder.layers.3.self_attn.q_proj.weight")
        'roberta.encoder.layer.3.attention.self.query.weight'
        """
        for fairseq_part, part in self.parts.items():
            pattern = re.escape(fairseq_part).replace(r"\*", r"(\d+)")
            if match := re.match(pattern, name):
                return part.replace("*", "".join(match.groups())) + name[match.end() :]
        return ""


def _name_positions(stack: str, hf_stack: str, hf_attention: str) -> dict[str, str]:
    """Name the positions of a stack, which ``hf.set_positions`` puts into it and its layers."""
    return {
        f"{stack}.embed_positions.encodings": f"{hf_stack}.positions.input",  # the input's
        f"{stack}.encodings": f"{hf_stack}.positions.shared",  # all layers'
        f"{stack}.layers.*.self_attn.encodings": f"{hf_attention}.positions.encodings",  # a layer's
    }


def _name_bert_options(side: str) -> dict[str, str]:
    """Name the options of an ``encoder`` or ``decoder`` in a configuration derived from BERT's."""
    return {  # fairseq's option -> field of config.json
        f"{side}_layers": "num_hidden_layers",
        f"{side}_embed_dim": "hidden_size",
        f"{side}_ffn_embed_dim": "intermediate_size",
        f"{side}_attention_heads": "num_attention_heads",
        "activation_fn": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }


def _define_roberta(prefix: str, base: str, *, pre_norm: bool) -> StockFamily:
    """Define the masked LMs whose names begin with ``prefix``; the stack is in ``base``."""
    stack, layer = "encoder.sentence_encoder", f"{base}.encoder.layer.*"
    attention_norm, feedforward_norm = "attention.output.LayerNorm", "output.LayerNorm"
    if pre_norm:
        attention_norm, feedforward_norm = "attention.LayerNorm", "intermediate.LayerNorm"
    return StockFamily(
        family="masked_lm",
        classes={
            "masked_lm": f"{prefix}ForMaskedLM",
            "classes": f"{prefix}ForSequenceClassification",
            "spans": f"{prefix}ForQuestionAnswering",
        },
        fixed_options={
            "encoder_normalize_before": pre_norm,
            "layernorm_embedding": True,
            "activation_fn": "gelu",  # the class's LM head has only it; fairseq's has the option's
        },
        parts={
            **_name_positions(stack, base, f"{layer}.attention.self"),
            f"{stack}.embed_tokens": f"{base}.embeddings.word_embeddings",
            f"{stack}.layernorm_embedding": f"{base}.embeddings.LayerNorm",
            f"{stack}.layer_norm": f"{base}.LayerNorm",  # only in pre-norm models
            f"{stack}.layers.*.self_attn.q_proj": f"{layer}.attention.self.query",
            f"{stack}.layers.*.self_attn.k_proj": f"{layer}.attention.self.key",
            f"{stack}.layers.*.self_attn.v_proj": f"{layer}.attention.self.value",
            f"{stack}.layers.*.self_attn.out_proj": f"{layer}.attention.output.dense",
            f"{stack}.layers.*.self_attn_layer_norm": f"{layer}.{attention_norm}",
            f"{stack}.layers.*.fc1": f"{layer}.intermediate.dense",
            f"{stack}.layers.*.fc2": f"{layer}.output.dense",
            f"{stack}.layers.*.final_layer_norm": f"{layer}.{feedforward_norm}",
            "encoder.lm_head.weight": "lm_head.decoder.weight",
            "encoder.lm_head.bias": "lm_head.decoder.bias",
            "encoder.lm_head": "lm_head",
            "classification_heads.sentence_classification_head": "classifier",
            "span_head.scores": "qa_outputs",
        },
        config_fields=_name_bert_options("encoder"),
        own_positions="learned",
    )


def _define_translation(
    name: str, *, pre_norm: bool, embedding_norm: bool, own_positions: str = ""
) -> StockFamily:
    """Define the translation models of a class by the place of their layer norms."""
    same = ["dropout", "attention_dropout", "activation_dropout"]  # options with the class's names
    options = {"activation_fn": "activation_function"}
    parts = {"decoder.output_projection": "lm_head"}
    for side in ("encoder", "decoder"):
        same += [f"{side}_layers", f"{side}_attention_heads", f"{side}_layerdrop"]
        options |= {f"{side}_embed_dim": "d_model", f"{side}_ffn_embed_dim": f"{side}_ffn_dim"}
        parts |= _name_positions(side, f"model.{side}", f"model.{side}.layers.*.self_attn")
    parts |= {"encoder": "model.encoder", "decoder": "model.decoder"}  # parts named as in fairseq
    return StockFamily(
        family="translation",
        classes={"translation": name},
        fixed_options={
            "encoder_normalize_before": pre_norm,
            "decoder_normalize_before": pre_norm,
            "layernorm_embedding": embedding_norm,
        },
        parts=parts,
        config_fields={**options, **{option: option for option in same}},
        own_positions=own_positions,
    )


ROBERTA = _define_roberta("Roberta", "roberta", pre_norm=False)
BIOGPT = StockFamily(
    family="causal_lm",
    classes={"causal_lm": "BioGptForCausalLM"},
    fixed_options={"decoder_normalize_before": True, "layernorm_embedding": False},
    parts={
        **_name_positions("decoder", "biogpt", "biogpt.layers.*.self_attn"),
        "decoder.output_projection": "output_projection",
        "decoder": "biogpt",  # ported from fairseq: its parts have the same names
    },
    config_fields={
        **_name_bert_options("decoder"),
        "activation_dropout": "activation_dropout",
        "decoder_layerdrop": "layerdrop",
    },
)
# A model is exported to the first that computes it; all are searched for the class of an import.
STOCK_FAMILIES = (
    ROBERTA,
    _define_roberta("RobertaPreLayerNorm", "roberta_prelayernorm", pre_norm=True),
    _define_roberta("XLMRoberta", "roberta", pre_norm=False),  # for imports: ROBERTA comes first
    BIOGPT,
    _define_translation("MarianMTModel", pre_norm=False, embedding_norm=False),
    _define_translation(
        "M2M100ForConditionalGeneration",
        pre_norm=True,
        embedding_norm=False,
        own_positions="sinusoidal(layout=fairseq)",
    ),
    _define_translation("BartForConditionalGeneration", pre_norm=False, embedding_norm=True),
    _define_translation("MBartForConditionalGeneration", pre_norm=True, embedding_norm=True),
)


def refuse_unsupported_parts(trained: OpenModel, target: str) -> None:
    """Refuse a model with parts that ``target`` (transformers or CTranslate2) lacks."""
    for stack in trained.stacks.values():
        parts = ["an adaptive softmax"] if getattr(stack, "adaptive_softmax", None) else []
        if any(getattr(stack, f"project_{side}_dim", None) for side in ("in", "out")):
            parts.append("projections of embeddings")
        if (embeddings := type(stack.embed_tokens)) is not nn.Embedding:  # such as AdaptiveInput
            parts.append(f"{embeddings.__name__} as token embeddings")
        if stack.spec.rotates_source:
            parts.append("rope(cross_attention=true)")
        if parts:
            raise UserError(f"{trained.path}: {target} has no model with {' or '.join(parts)}")
