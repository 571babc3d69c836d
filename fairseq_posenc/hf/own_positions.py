"""Reads the positions that a transformers model has, as a spec: what ``own`` in a spec means.

Positions that were set in a model are read from its modules, all others from its configuration.
"""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from fairseq_posenc.encodings.rope import read_rope
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.families import Family, find_family
from fairseq_posenc.hf.settings import LENGTH_FIELD, SPEC_FIELD
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.own_specs import join_layers
from fairseq_posenc.specs import Spec, parse

# Field of a configuration with the length in training, if `write_length` wrote another length.
_REPLACED_LENGTH_FIELD = "position_encoding_trained_length"
_LENGTH_FIELDS = ("max_position_embeddings", "max_target_positions", "n_positions")


def read_positions(model: Any) -> str:
    """Read the canonical spec of the positions that a model has.

    >>> from transformers import LlamaConfig
    >>> read_positions(LlamaConfig(rope_theta=500000.0))
    'rope(base=500000,layout=half)'

    ``model`` may be its configuration. A type that is not known, and positions that the library
    does not have, are refused.
    """
    return str(read_spec(model))


def read_spec(model: Any) -> Spec:
    """Read the positions that a model, or its configuration, has: see :func:`read_positions`."""
    if (positions := _find_positions(model)) is not None:  # its config may be another model's
        return positions.spec
    config = getattr(model, "config", model)
    if not isinstance(config, PretrainedConfig):
        raise UserError(f"{shortened(repr(model))} is not a model: load one by from_pretrained")
    # Not in a model that is being built: it still has the stock positions, and will get this spec.
    if config is model and (spec := getattr(config, SPEC_FIELD, None)) is not None:
        return parse(spec)
    config = config.get_text_config()  # that of the text model, if this is a part; else itself
    try:
        return parse(_read_configuration(config))
    except UserError as error:
        raise UserError(f"a model of type {shortened(str(config.model_type))!r}: {error}") from None


def count_positions(model: Any) -> int:
    """Count the positions that a model has room for, or those that a configuration states."""
    if (positions := _find_positions(model)) is not None:
        return positions.dims.max_positions
    return int(getattr(model, LENGTH_FIELD, None) or read_trained_length(model))  # models lack it


def _find_positions(model: Any) -> StackPositions | None:
    """Find the positions of a model's first stack; None for a stock model or a configuration."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return next((part for part in parts if isinstance(part, StackPositions)), None)


def read_trained_length(model: Any) -> int:
    """Read the length that a model was trained at: its limit, or the rows of its table."""
    config = getattr(model, "config", model).get_text_config()
    if (trained := getattr(config, _REPLACED_LENGTH_FIELD, None)) is not None:
        return int(trained)
    family = find_family(type(config)) or Family()
    if names := _find_length_fields(config):
        return int(getattr(config, names[0])) - family.first_id(config)  # rows before position 0
    if family.bias:  # T5, whose configuration has no length
        return 512  # tokens of its pre-training
    raise UserError(f"a model of type {shortened(str(config.model_type))!r} states no length")


def write_length(config: PretrainedConfig, length: int) -> None:
    """State another number of positions in a configuration, where other programs read it."""
    config = config.get_text_config()
    names = _find_length_fields(config)
    if names and length != read_trained_length(config):
        setattr(config, _REPLACED_LENGTH_FIELD, read_trained_length(config))  # before it changes
    family = find_family(type(config)) or Family()
    for name in names:
        setattr(config, name, length + family.first_id(config))


def _find_length_fields(config: PretrainedConfig) -> list[str]:
    return [name for name in _LENGTH_FIELDS if (getattr(config, name, None) or 0) > 0]


def _read_configuration(config: PretrainedConfig) -> str:
    """Write the spec of the positions that a configuration of a known type describes."""
    family = find_family(type(config))
    if family is None:
        raise UserError(explain_unservable(config) or "its positions are not known here")
    if family.bias:  # T5's table of distances
        distance = config.relative_attention_max_distance
        return f"t5(num_buckets={config.relative_attention_num_buckets},max_distance={distance})"
    if family.sinusoids == "fairseq" and config.pad_token_id != 1:
        raise UserError(
            f"its positions begin at {config.pad_token_id} + 1, after pad_token_id, and those of "
            "sinusoidal(layout=fairseq) at 2: write another spec"
        )
    if family.table:  # vectors at the input, and nothing else
        return f"sinusoidal(layout={family.sinusoids})" if family.sinusoids else "learned"
    if not (layers := _read_layers(config, family)):
        raise UserError("none of its layers has attention that can be served")
    return join_layers(layers)


ATTENTION_TYPES = {"full_attention", "sliding_attention"}  # types of layers that are served
# Why types without a family cannot be served, by parts of the type: `vl` for `paddleocr_vl_text`.
_REASONS = [
    (("vl", "glm4v", "omni"), "its code counts them on several axes (M-RoPE)"),
    (("gemma3n",), "its layers share keys and values with others"),
    (("inkling", "inkling2"), "its own code adds relative states to the scores"),
    (("umt5",), "each layer has its own table of buckets, and here all layers share one"),
    (("bloom", "falcon", "mpt", "deberta", "xlnet"), "it takes no other attention"),
]


def explain_unservable(model: Any) -> str | None:
    """Explain why a model, or that of a configuration, is not served; None if it is unknown."""
    whole = getattr(model, "config", model)
    config = whole.get_text_config()
    if config is not whole and find_family(type(config)) is not None:
        return "set those of a part: model.model.language_model, or model.encoder and model.decoder"
    if vars(config).get("kv_lora_rank"):  # getattr raises if it differs by layer
        return "its latent attention (MLA) rotates a part of each head that its own code appends"
    words = re.split("[_-]", str(config.model_type))  # so that `vl` is not found in `vlad`
    if reasons := [reason for parts, reason in _REASONS if {*parts} & {*words}]:
        return reasons[0]
    other = sorted(set(map(str, getattr(config, "layer_types", None) or ())) - ATTENTION_TYPES)
    return f"it has layers of {shortened(', '.join(other))}" if other else None


def _read_layers(config: PretrainedConfig, family: Family) -> list[str]:
    """Write the spec of each layer of a model with rotations that has attention."""
    # The forms `pairs` and `doubled_pairs` rotate adjacent coordinates, the others two halves.
    layout = "interleaved" if "pairs" in family.cosines else "half"
    layers = []
    for index in range(config.num_hidden_layers):
        layer_type = _find_layer_type(config, index)
        if layer_type not in ATTENTION_TYPES:
            continue
        items = []
        if _is_rotated(config, family, index, layer_type):
            # A dictionary for each type of layer in some models, else one for all.
            rotation = dict(config.rope_parameters.get(layer_type, config.rope_parameters))
            if bases := getattr(config, "layer_rope_theta", None):
                rotation["rope_theta"] = bases[index]
            reads_factor = family.partial or rotation.get("rope_type") == "proportional"
            part = rotation.get("partial_rotary_factor", 1.0) if reads_factor else 1.0
            # As a part of the widest heads, for which a stack's rotations are built.
            rotation["partial_rotary_factor"] = part * read_head_share(config, index)
            if family.sections:  # M-RoPE of a text model; the configuration's own sections win
                rotation = {"mrope_section": family.sections} | rotation
            pairs = family.pairs if family.sections else None  # how the axes share them
            items.append(read_rope(rotation, config.max_position_embeddings, layout, pairs))
        if layer_type == "sliding_attention":
            items.append(f"window(size={_read_window(config)})")
        layers.append("+".join([*items, *_read_softmax(config, family)]) or "none")
    return layers


def read_head_share(config: PretrainedConfig, index: int) -> float:
    """Read the width of a layer's heads, divided by that of the widest; 1 in most models."""
    if "head_dim" not in (getattr(config, "per_layer_attributes", None) or ()):
        return 1
    widths = [layer.head_dim for layer in config.per_layer_config]
    return float(widths[index] / max(widths))


def _find_layer_type(config: PretrainedConfig, index: int) -> str:
    """Find which keys a layer sees, in the words of ``layer_types``."""
    if (layer_types := getattr(config, "layer_types", None)) is not None:
        return str(layer_types[index])
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if window else "full_attention"


def _is_rotated(config: PretrainedConfig, family: Family, index: int, layer_type: str) -> bool:
    """Check whether a layer has rotations; in some models, only a part of the layers has them."""
    for field in ("layer_rope_theta", "no_rope_layers"):  # 0 for a layer without
        if flags := getattr(config, field, None):
            return bool(flags[index])
    if family.rotation_flag:  # an attribute by which attentions differ: those with a window rotate
        # EXAONE 4 (`is_sliding`) without a window rotates in all layers.
        everywhere = family.rotation_flag == "is_sliding" and config.sliding_window is None
        return everywhere or layer_type == "sliding_attention"
    return config.rope_parameters is not None


def _read_window(config: PretrainedConfig) -> int:
    """Read the size of windows as the spec counts it: its keys if causal, else twice one side's."""
    if config.model_type == "modernbert":
        return int(config.local_attention)
    if not getattr(config, "is_causal", True):
        return 2 * int(config.sliding_window)  # it counts one side
    if getattr(config, "use_bidirectional_attention", None) is True:  # not Gemma 4's "vision"
        return 2 * (int(config.sliding_window) - 1)  # here it counts the query and one side
    return int(getattr(config, "sliding_window", 0))  # hybrids have none; parsing refuses 0


def _read_softmax(config: PretrainedConfig, family: Family) -> list[str]:
    """List the encodings of a layer that change its softmax: sinks, a cap, or a temperature."""
    if family.sinks:
        return ["sink"]
    if config.model_type in ("gemma2", "vaultgemma") and config.attn_logit_softcapping:
        return [f"softcap(cap={config.attn_logit_softcapping})"]
    if family.temperature and (beta := config.rope_parameters.get(family.temperature)):
        return [f"ministral3(beta={beta},length={config.rope_parameters[TRAINED_LENGTH]})"]
    return []
