"""Writes positions to the configuration of a stock class of transformers.

It is the inverse of :mod:`~fairseq_posenc.hf.own_positions`, which reads back what was written: a
configuration that reads back as other positions is not used.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH, Dynamic, Ntk, Scaled
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.families import Family
from fairseq_posenc.hf.own_positions import ATTENTION_TYPES, read_spec
from fairseq_posenc.registry import options
from fairseq_posenc.specs import Items, Spec

_TEMPERATURE = "llama_4_scaling_beta"  # of Ministral 3


def list_unknown_items(spec: Spec, family: Family) -> list[str]:
    """List the encodings of a spec that no stock class with a family's weights has."""
    parts = {
        **dict.fromkeys(("rope", "window", "none", "softcap"), family.rotary),
        "learned": family.table and not family.sinusoids,
        "sinusoidal": family.sinusoids,
        "t5": family.bias,
        "sink": family.sinks,
        "ministral3": family.temperature,
    }
    return [
        str(item)
        for item in spec.items
        if not parts.get(item.name) or (item.name == "window" and "first" in dict(item.options))
    ]


def write_configuration(config_class: Any, config: Any, spec: Spec, dims: Dims) -> Any:
    """Write positions to a configuration of a stock class; None if it cannot state them.

    Args:
        config_class: the stock class.
        config: the configuration of the model, of this class or another.
        spec: the positions.
        dims: sizes of the stack.
    """
    known = {field.name for field in fields(config_class)}
    content = {name: value for name, value in config.to_dict().items() if name in known}
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    attending = [index for index, name in enumerate(types) if name in ATTENTION_TYPES]
    layers = [spec.layers[index % len(spec.layers)] for index in range(len(attending))]
    windows = [find_options(layer, "window").get("size") for layer in layers]
    for index, window in zip(attending, windows):
        types[index] = "sliding_attention" if window else "full_attention"
    size = next(filter(None, windows), None)
    if size is not None and not known & {"sliding_window", "local_attention"}:
        return None
    ropes = [find_options(layer, "rope") for layer in layers]
    written = [_write_rope(rope, layer, dims) if rope else {} for rope, layer in zip(ropes, layers)]
    stated = {
        "head_dim": dims.head_dim,
        "layer_types": types,
        "use_sliding_window": size is not None,
        "no_rope_layers": [int(bool(rope)) for rope in ropes],  # 1 if it rotates
        "layer_rope_theta": [rope.get("rope_theta", 0) for rope in written],
        "rope_parameters": _join_by_type(config_class, types, attending, written, dims),
        "attn_logit_softcapping": find_options(layers[0], "softcap").get("cap"),
        "relative_attention_num_buckets": find_options(layers[0], "t5").get("num_buckets"),
        "relative_attention_max_distance": find_options(layers[0], "t5").get("max_distance"),
    }
    if size is not None or "layer_types" not in known:  # else the present one has no effect
        stated |= {"sliding_window": size, "local_attention": size}
    if any(isinstance(rope.get("scaling"), Dynamic) for rope in ropes):
        stated["max_position_embeddings"] = dims.trained_length
    content |= {name: value for name, value in stated.items() if name in known}
    attention = {"attn_implementation": "eager"} if stated["attn_logit_softcapping"] else {}
    try:
        stock = config_class.from_dict({**content, **attention})
    except (StrictDataclassError, KeyError):  # it refuses such layers, or such a scaling
        return None
    vars(stock).update(attention)  # to be saved: transformers' sdpa leaves a cap out
    try:
        back = read_spec(stock)
    except UserError:
        return None
    same = _state_layers(back, dims, len(layers)) == _state_layers(spec, dims, len(layers))
    return stock if same else None


def find_options(layer: Items, name: str) -> dict[str, Any]:
    """Find the options of an encoding in a layer, with defaults; empty if the layer lacks it."""
    item = next((item for item in layer if item.name == name), None)
    if item is None:
        return {}
    defaults = {key: option.default for key, option in options(name).items()}
    return defaults | dict(item.options)


def _write_rope(rope: dict[str, Any], layer: Items, dims: Dims) -> dict[str, Any]:
    """Write the options of a rotation as ``rope_parameters``, with the temperature of its layer."""
    scaling, base = rope["scaling"], rope["base"]
    written: dict[str, Any] = {"rope_type": "default"}
    if type(scaling) is Ntk:  # which transformers writes as another base
        base = scaling.scaled_base(base, int(rope["fraction"] * dims.head_dim), dims)
    elif isinstance(scaling, Scaled):
        written = Scaled.to_hf(scaling, dims)
        written.pop("max_position_embeddings", None)  # a field beside `rope_parameters`
    if rope["fraction"] != 1:
        written["partial_rotary_factor"] = rope["fraction"]
    if temperature := find_options(layer, "ministral3"):
        written[_TEMPERATURE] = temperature["beta"]
        written[TRAINED_LENGTH] = temperature["length"] or dims.trained_length
    return {**written, "rope_theta": base}


def _join_by_type(
    config_class: Any,
    types: list[str],
    attending: list[int],
    written: list[dict[str, Any]],
    dims: Dims,
) -> dict[str, Any]:
    """Join the ``rope_parameters`` of layers as a class states them: once, or by type of layer."""
    rotating = [rope for rope in written if rope] or [{"rope_type": "default", "rope_theta": 1e4}]
    present = getattr(config_class(), "rope_parameters", None) or {}
    if not any(isinstance(value, dict) for value in present.values()):
        if _TEMPERATURE in present:  # 0 leaves the scores as they are
            return {_TEMPERATURE: 0.0, TRAINED_LENGTH: dims.trained_length, **rotating[0]}
        return rotating[0]
    by_type = {types[index]: rope for index, rope in zip(attending, written) if rope}
    return {name: by_type.get(name, rotating[0]) for name in present}


def _state_layers(spec: Spec, dims: Dims, layers: int) -> list[tuple[Any, ...]]:
    """Describe each layer in a form that does not depend on how its positions are written.

    The base and the scaling of a rotation are described by ``rope_parameters``, in which a length
    that is left out, and a scaling that is another base, are numbers.
    """
    stated: list[tuple[Any, ...]] = []
    for index in range(layers):
        items = (*spec.whole_stack, *spec.layers[index % len(spec.layers)])
        if rope := find_options(items, "rope"):
            parameters = _write_rope(rope, items, dims)
            length = getattr(rope.pop("scaling"), "length", None) or dims.trained_length
            del rope["base"]
            items = tuple(item for item in items if item.name not in ("rope", "ministral3"))
            stated.append((parameters, length, rope, set(items)))
        else:
            stated.append((set(items),))
    return stated
