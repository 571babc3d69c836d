"""Builds the config.json of an exported model, and collects its weights under the names there."""

from __future__ import annotations

import re
from typing import Any

from fairseq.data import Dictionary
from torch import Tensor

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.specs import Spec
from fairseq_posenc.workbench.loading.open_model import OpenModel

ARCHITECTURES = {
    "masked_lm": "PosencForMaskedLM",
    "classes": "PosencForSequenceClassification",
    "spans": "PosencForQuestionAnswering",
    "causal_lm": "PosencForCausalLM",
    "translation": "PosencForSeq2SeqLM",
}
_ENCODER_HEADS = ("masked_lm", "classes", "spans")  # heads whose classes load an encoder's weights
# fairseq's names of activations -> names in transformers, where they differ.
ACTIVATIONS = {
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "relu_squared": "relu2",
    "swish": "silu",
}
_LONGEST_TRANSLATION = 200  # tokens that fairseq-generate writes at most, without </s>
_EXPORTED_NAMES = {  # parts of fairseq's names -> those of an exported model
    r"^encoder\.sentence_encoder\.": "encoder.",
    r"^encoder\.lm_head\.": "lm_head.",
    r"^classification_heads\.[^.]+\.": "classifier.",
    r"^decoder\.output_projection\.": "output_projection.",
    r"\.embed_positions\.encodings\.": ".positions.",
}


def collect_weights(trained: OpenModel) -> dict[str, Tensor]:
    """Copy the weights, under the names that they have in the exported code.

    The pre-training head of a fine-tuned model is left out; tied output embeddings are stored once.
    """
    left_out = [] if trained.head == "masked_lm" else ["encoder.lm_head."]
    if trained.ties_embeddings:
        left_out += ["encoder.lm_head.weight", "decoder.output_projection."]
    if trained.head != "classes":
        left_out.append("classification_heads.")
    return {
        to_exported_name(name): weight.detach().clone().contiguous()
        for name, weight in trained.weights.items()
        if not name.startswith(tuple(left_out))
    }


def to_exported_name(name: str) -> str:
    """Convert fairseq's name of a parameter to that of an exported model."""
    for pattern, exported in _EXPORTED_NAMES.items():
        name = re.sub(pattern, exported, name)
    return name


def build_config(trained: OpenModel) -> dict[str, Any]:
    """Build config.json, without the settings that depend on the tokenizer."""
    masked = trained.family.name == "masked_lm"
    args: Any = trained.model.args if masked else trained.model.decoder.cfg
    option = "pooler_activation_fn" if trained.head == "classes" else "activation_fn"
    activation = str(getattr(args, option))
    stacks = {
        f"{side}_stack": _build_stack_config(stack, side) for side, stack in trained.stacks.items()
    }
    heads = _ENCODER_HEADS if masked else (trained.head,)
    module = "modeling_fairseq_posenc"
    classes = [ARCHITECTURES[head] for head in heads]
    autos = {  # such as AutoModelForMaskedLM: modeling_fairseq_posenc.PosencForMaskedLM
        f"AutoModelFor{name.partition('For')[2]}": f"{module}.{name}" for name in classes
    }
    config: dict[str, Any] = {
        "model_type": "fairseq_posenc",
        "architectures": [ARCHITECTURES[trained.head]],
        "auto_map": {"AutoConfig": f"{module}.PosencConfig", **autos},
        "tied_output": trained.ties_embeddings,
        "head_activation": ACTIVATIONS.get(activation, activation),
        "is_encoder_decoder": trained.translates,
        **_list_special_tokens(trained),
        "dtype": "float32",
        **stacks,
    }
    if trained.head == "classes":
        (classifier,) = trained.model.classification_heads.values()
        config["id2label"] = _name_classes(trained, classifier.out_proj.out_features)
        config["label2id"] = {label: int(key) for key, label in config["id2label"].items()}
    return config


def build_generation_config(trained: OpenModel) -> dict[str, Any]:
    """Build generation_config.json: the search of ``fairseq-generate`` with its defaults."""
    config: dict[str, Any] = _list_special_tokens(trained)
    if trained.translates:
        decoder = trained.stacks["decoder"]
        # As in fairseq's search: at least one token before </s>, and padding is never generated.
        config |= {
            "num_beams": 5,
            "early_stopping": True,
            "length_penalty": 1.0,
            "min_new_tokens": 1,
            "max_new_tokens": min(_LONGEST_TRANSLATION, decoder.max_positions() - 1) + 1,  # </s>
            "suppress_tokens": [decoder.padding_idx],
        }
    return config


def _list_special_tokens(trained: OpenModel) -> dict[str, int]:
    """List special symbols by transformers' names, those of the decoder if there is one."""
    *_, stack = trained.stacks.values()
    tokens = {
        "pad_token_id": stack.padding_idx,
        "eos_token_id": stack.eos_idx,
        "bos_token_id": stack.dictionary.bos(),
    }
    if trained.translates:
        tokens["decoder_start_token_id"] = stack.eos_idx  # fairseq's decoders begin with </s>
    return tokens


def list_layer_options(spec: Spec) -> list[dict[str, dict[str, Any]]]:
    """List, for each layer, encodings and their options; see ``StackConfig.positions``."""
    return [
        {
            item.name: {key: str(x) if isinstance(x, Scaling) else x for key, x in item.options}
            for item in (*spec.whole_stack, *layer)
        }
        for layer in spec.layers
    ]


def _build_stack_config(stack: Any, side: str) -> dict[str, Any]:
    """Collect the fields of a ``StackConfig``."""
    cfg = stack.cfg
    dims = stack.assembly.dims
    layer = stack.layers[0]
    return {
        "vocab_size": stack.embed_tokens.num_embeddings,
        "padding_idx": stack.padding_idx,
        "eos_idx": stack.eos_idx,
        "unk_idx": stack.dictionary.unk(),
        "embed_dim": dims.embed_dim,
        "ffn_dim": layer.fc1.out_features,
        "num_heads": dims.num_heads,
        "num_layers": len(stack.layers),
        "max_positions": dims.max_positions,
        "trained_on": dims.trained_length,
        "positions": list_layer_options(stack.assembly.spec),
        "directions": list(stack.directions),
        "causal": dims.causal,
        "embed_scale": stack.embed_scale,
        "activation": ACTIVATIONS.get(cfg.activation_fn, cfg.activation_fn),
        "embedding_norm": stack.layernorm_embedding is not None,
        "norm_before": getattr(cfg, side).normalize_before,
        "final_norm": stack.layer_norm is not None,
        "memory_dim": cfg.encoder.embed_dim if getattr(layer, "encoder_attn", None) else None,
        "dropout": float(cfg.dropout),
        "attention_dropout": float(cfg.attention_dropout),
        "activation_dropout": float(cfg.activation_dropout),
    }


def _name_classes(trained: OpenModel, classes: int) -> dict[str, str]:
    """Name the classes, by the dictionary of the labels if there is one."""
    path = trained.data / "label" / DICTIONARY
    labels = load_dictionary(path, mask=False) if path.is_file() else Dictionary()
    # fairseq fills dictionaries up with `madeupword0000` and so on.
    names = [x for x in labels.symbols[labels.nspecial :] if not x.startswith("madeupword")]
    if len(names) != classes:
        names = [f"LABEL_{number}" for number in range(classes)]
    return {str(number): name for number, name in enumerate(names)}
