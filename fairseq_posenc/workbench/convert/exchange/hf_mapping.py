"""Converts configurations and weights of models to and from model classes of transformers.

Classes differ in names and shapes of the same weights. An export with our code has
``encoder.layers.0.self_attn.q_proj.weight``, a RoBERTa of transformers has
``roberta.encoder.layer.0.attention.self.query.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.checkpoints.state_dict_adapter import LEARNED_TABLE
from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.specs import Spec
from fairseq_posenc.workbench.convert.exchange.config_json import ARCHITECTURES, to_exported_name
from fairseq_posenc.workbench.convert.exchange.encoding_maps import (
    HFClass,
    ParamMap,
    list_hf_classes,
    parse_positions,
)
from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import read_class_name
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import EXPORTED_AS, FAIRSEQ
from fairseq_posenc.workbench.convert.exchange.param_names import LAYOUTS, Layout
from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.open_model import OpenModel

_POSITION_PARAMETER = (
    r"(?:encoder|decoder)\."
    r"(?:positions|encodings|layers\.(?P<layer>\d+)\.self_attn\.encodings)\.\w+\."
)
_QUERY_OR_KEY = r"\.self_attn\.[qk]_proj\."
_OUTPUT_EMBEDDINGS = ("lm_head.weight", "output_projection.weight")
_TIED_PAIRS = (  # a copy that transformers may save, and the weight
    ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("lm_head.decoder.bias", "lm_head.bias"),
)
_BUFFERS = ("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids")
# GPT-NeoX has one tensor for three of our projections, which the maps of names call
# `attention.query_key_value.q`, `.k` and `.v`.
_JOINED = "query_key_value"
_PROJECTIONS = ("q", "k", "v")
_PROJECTION = re.compile(rf"(.+\.{_JOINED})\.([qkv])\.(\w+)")


class Export(NamedTuple):
    """A model in the form of a class of transformers."""

    config: dict[str, Any]  # config.json
    weights: dict[str, Tensor]


def to_hf_class(
    trained: OpenModel, config: dict[str, Any], weights: dict[str, Tensor], for_version_4: bool
) -> tuple[Export | None, str]:
    """Convert a model to a class of transformers.

    Args:
        trained: the model.
        config: config.json of an export with code.
        weights: weights of an export with code.
        for_version_4: whether the model is for transformers 4 alone.

    Returns:
        The converted model, and an empty text; or None, and the reason why no class can have it.
    """
    if len(trained.stacks) > 1:
        return None, "transformers has no class for two stacks of this kind"
    (stack,) = trained.stacks.values()
    encodings = _list_encodings(stack)
    layers_equal = len(stack.assembly.spec.layer_kinds) == 1
    classes = list_hf_classes(encodings[0]) if len(encodings) == 1 and layers_equal else []
    for hf_class in classes:
        layout = LAYOUTS[hf_class.model]
        if trained.head not in layout.heads:
            continue
        if hf_class.only_in_version_4 and not for_version_4:
            return None, f"{hf_class.model} has these positions up to transformers 4"
        if why_not := _describe_misfit(trained, config, layout):
            return None, f"{layout.heads[trained.head]} {why_not}"
        scale = config[layout.style.stack]["embed_scale"]
        converted = _convert_weights(weights, hf_class, layout, scale)
        joined = join_query_key_value(converted, config[layout.style.stack]["num_heads"])
        return Export(_convert_config(config, hf_class, layout), joined), ""
    return None, f"transformers has no class with {stack.identity.positions} in such a model"


def _list_encodings(stack: Any) -> list[Encoding]:
    """List the encodings of a stack: at the input, shared, and of the first layer."""
    at_input = [] if stack.embed_positions is None else [stack.embed_positions.encodings]
    groups = [*at_input, stack.encodings, stack.layers[0].self_attn.encodings]
    return [encoding for group in groups for encoding in group.as_list()]


def _describe_misfit(trained: OpenModel, config: dict[str, Any], layout: Layout) -> str:
    """Say what the class of transformers is like that keeps it from holding a model; "" if not."""
    stack = config[layout.style.stack]
    activation = layout.activations.get(trained.head)
    if activation not in (None, config["head_activation"]):
        return f"has {activation} in its head"
    if not stack["causal"] and set(stack["directions"]) != {"both"}:
        return "has no attention directions"
    if trained.head in ("masked_lm", "causal_lm") and not trained.ties_embeddings:
        return "ties its output embeddings to those of the input"
    for name, value in layout.style.required.items():
        if stack[name] != value:
            return f"is built with other {name.replace('_', ' ')}"
    return ""


def _convert_config(config: dict[str, Any], hf_class: HFClass, layout: Layout) -> dict[str, Any]:
    """Convert config.json of an export with code to that of a class of transformers."""
    stack = config[layout.style.stack]
    (our_class,) = config["architectures"]
    head = next(head for head, name in ARCHITECTURES.items() if name == our_class)
    copied = ("pad_token_id", "eos_token_id", "bos_token_id", "dtype", "id2label", "label2id")
    converted = {
        "model_type": layout.model_type,
        "architectures": [layout.heads[head]],
        **{theirs: stack[ours] for ours, theirs in layout.style.sizes.items()},
        **layout.style.config,
        **({"type_vocab_size": 1} if layout.token_types else {}),
        **hf_class.config,
        **{name: config[name] for name in copied if name in config},
    }
    fairseq_options = dict(config[FAIRSEQ])
    parsed = parse_positions(hf_class.model, converted)
    if parsed is not None:  # what an import will read: the same positions, perhaps in other words
        item, _ = parsed
        fairseq_options[EXPORTED_AS] = str(Spec.uniform((item,)))
    return {**converted, FAIRSEQ: fairseq_options}


def _convert_weights(
    weights: dict[str, Tensor], hf_class: HFClass, layout: Layout, scale: float
) -> dict[str, Tensor]:
    """Convert weights of an export with code; ``scale`` is the factor of the embeddings."""
    converted = dict(hf_class.fixed)
    for name, weight in weights.items():
        param_map = _map_param(name, layout, hf_class)
        converted[param_map.name] = param_map.to_hf(weight).contiguous().clone()
    if layout.token_types:
        width = weights["encoder.embed_tokens.weight"].size(1)
        converted[layout.token_types] = torch.zeros(1, width)
    if layout.scaled_embeddings:
        converted[layout.scaled_embeddings] = weights["decoder.embed_tokens.weight"] * scale
    return converted


def from_hf_weights(
    config: dict[str, Any], weights: dict[str, Tensor], wanted: list[str], model: Any
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert the weights of a folder to fairseq's names.

    Args:
        config: config.json of the folder.
        weights: tensors of the folder.
        wanted: fairseq's names of the model's weights.
        model: a fairseq model with the positions of the folder.

    Returns:
        The weights by fairseq's names, and the names of the folder's tensors that have no place.

    Raises:
        UserError: the folder has tensors that a fairseq model cannot have.
    """
    _, stack = list_stacks(model)[0]
    weights = _split_query_key_value(weights, stack.assembly.dims.num_heads)
    layout, hf_class = _find_class(config, stack)
    converted: dict[str, Tensor] = {}
    # A layout has "" in place of the name of a tensor that the class lacks, and no weight is called
    # so: below, `weights.get` then returns None.
    known = {*hf_class.fixed, layout.token_types, layout.scaled_embeddings, *_list_copies(weights)}
    for name in wanted:
        param_map = _map_param(to_exported_name(name), layout, hf_class)
        # Tied output embeddings are stored once, as those of the input.
        if name.endswith(_OUTPUT_EMBEDDINGS) and param_map.name not in weights:
            side = "encoder" if name.startswith("encoder.") else "decoder"
            param_map = _map_param(f"{side}.embed_tokens.weight", layout, hf_class)
        if param_map.name in weights:
            converted[name] = param_map.from_hf(weights[param_map.name])
            known.add(param_map.name)
    scaled = weights.get(layout.scaled_embeddings)
    if scaled is not None and not model.decoder.share_input_output_embed:
        converted["decoder.embed_tokens.weight"] = scaled / model.decoder.embed_scale
    types = weights.get(layout.token_types)
    if types is not None and types[0].any():  # row 0 is added to every token: move it to positions
        table = next((name for name in converted if name.endswith(LEARNED_TABLE)), None)
        if table is None:
            raise UserError("its token types are vectors, but the model has no table for them")
        converted[table] = converted[table] + types[0]
    return converted, sorted(weights.keys() - known)


def _list_copies(weights: dict[str, Tensor]) -> list[str]:
    """List the tensors that are copies of weights, and buffers; refuse copies that differ."""
    copies = []
    for second, first in _TIED_PAIRS:
        if second in weights and first in weights:
            if not torch.equal(weights[second], weights[first]):
                raise UserError(f"{second} is not {first}: a RoBERTa of fairseq ties them")
            copies.append(second)
    return [*copies, *_BUFFERS]


def _find_class(config: dict[str, Any], stack: Any) -> tuple[Layout, HFClass]:
    """Find the class that a config.json names, and the layout of its parameters."""
    if config.get("model_type") == "fairseq_posenc":  # an export with code: nothing is mapped
        return Layout("fairseq_posenc", {}, {}), HFClass("", {})
    name = read_class_name(config)
    encoding, *_ = _list_encodings(stack)
    for hf_class in list_hf_classes(encoding):
        if name in LAYOUTS[hf_class.model].heads.values():
            return LAYOUTS[hf_class.model], hf_class
    raise UserError(f"a {shortened(name)} has no positions such as {encoding.name}")


def _map_param(name: str, layout: Layout, hf_class: HFClass) -> ParamMap:
    """Find the tensor of a class of transformers for a parameter of an export with code."""
    match = re.match(_POSITION_PARAMETER, name)
    if match and hf_class.weights:
        mapped = hf_class.weights[name[match.end() :]]  # a class maps all parameters or none
        return mapped._replace(name=mapped.name.format(match["layer"]))
    to_hf: Callable[[Tensor], Tensor] = torch.clone
    from_hf: Callable[[Tensor], Tensor] = torch.clone
    if hf_class.order is not None and re.search(_QUERY_OR_KEY, name):
        to_hf = partial(_reorder, hf_class.order)
        from_hf = partial(_reorder, hf_class.order.argsort())
    for ours, theirs in layout.names.items():
        match = re.match(re.escape(ours).replace(r"\{\}", r"(\d+)"), name)
        if match:
            hf_name = theirs.format(*match.groups()) + name[match.end() :]
            return ParamMap(hf_name, to_hf, from_hf)
    return ParamMap(name, to_hf, from_hf)


def _reorder(order: Tensor, weight: Tensor) -> Tensor:
    """Reorder the rows of each head, ``(H * D, ...)``, as rotations pair them in another layout."""
    return weight.unflatten(0, (-1, order.numel()))[:, order].flatten(0, 1)


def join_query_key_value(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Join the weights ``query_key_value.q``, ``.k`` and ``.v`` of each layer into one tensor.

    Its rows are the query, key and value of the first head, then of the second: ``(H * 3 * D, C)``.
    """
    joined: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _PROJECTION.fullmatch(name)
        if match is None:
            joined[name] = weight
            continue
        stem, projection, kind = match.groups()  # kind: `weight` or `bias`
        if projection == "q":  # "k" and "v" are joined with it
            parts = [weights[f"{stem}.{part}.{kind}"] for part in _PROJECTIONS]
            rows = torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1)
            joined[f"{stem}.{kind}"] = rows.flatten(0, 2)  # from [H, 3, D, C]
    return joined


def _split_query_key_value(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Split each tensor of :func:`join_query_key_value` into its parts."""
    separate: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(f".{_JOINED}") or weight.size(0) % (3 * heads):
            separate[name] = weight
            continue
        parts = weight.unflatten(0, (heads, 3, -1)).unbind(1)  # 3 of [H, D, C]
        for projection, rows in zip(_PROJECTIONS, parts):
            separate[f"{stem}.{projection}.{kind}"] = rows.flatten(0, 1)
    return separate
