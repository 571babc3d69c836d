"""Finds the stock transformers model that computes the same as a model with positions.

Its folder needs nothing of this package: scripts and servers read it as any other. A stock model is
used only if its configuration states the model's spec, its weights are the same by name and shape,
and it computes the same from random tokens: padded on either side, and with a cache. Writing a
configuration (:func:`write_configuration`) is the inverse of reading it, in
:mod:`~fairseq_posenc.hf.own_positions`.
"""

import inspect
from dataclasses import fields
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, PreTrainedModel

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH, Ntk
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.families import Stack, find_family
from fairseq_posenc.hf.own_positions import (
    ATTENTION_TYPES,
    find_options,
    read_head_share,
    read_spec,
)
from fairseq_posenc.hf.settings import POSITIONS, SPEC_FIELD, PositionSettings
from fairseq_posenc.identity import is_identity
from fairseq_posenc.specs import Items, Spec

AUTO_CLASSES: list[Any] = [
    getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModel")
]
_LARGEST_DIFFERENCE = 2e-5  # as a part of the largest output: room for float32's rounding
_LONGEST_INPUT = 1024  # tokens that are compared; a wider window only reads back as the same
_TEMPERATURE = "llama_4_scaling_beta"  # of Ministral 3, in its `rope_parameters`
# Model type -> another type whose weights have the same names, and which has layers with windows,
# or without positions.
_OTHERS = {"cohere": "cohere2", "dots1": "exaone_moe", "olmo2": "olmo3", "seed_oss": "qwen2"}
_OTHERS |= dict.fromkeys(
    ("cwm", "ernie4_5", "helium", "llama", "ministral", "ministral3", "mistral"), "smollm3"
)


class NoStockModelError(Exception):
    """No stock model computes the same as a model; the message says why."""


def find_stock_model(model: Any) -> PreTrainedModel:
    """Build the stock model that computes the same as a model whose positions were set.

    It shares the weights of the model. Its class may be another one with weights of the same names
    and shapes: SmolLM3 has those of Llama, and layers without positions.

    Raises:
        NoStockModelError: no class has it, or it cannot be compared.
    """
    stacks = find_family(type(model.config)).find_stacks(model)  # type: ignore[union-attr]
    _refuse_incomparable(model)
    reasons = []
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would warn of configurations that are tried
    try:
        for stock_class in _list_classes(type(model).stock):  # from which `derive` has made it
            try:
                return _build(stock_class, model, stacks)
            except NoStockModelError as reason:
                reasons.append(str(reason))
    finally:
        transformers.logging.set_verbosity(verbosity)
    raise NoStockModelError("; ".join(reasons))


def _refuse_incomparable(model: Any) -> None:
    """Refuse models that cannot be run here as they are, or whose weights are not plain tensors."""
    settings = PositionSettings.read(model.config)
    if settings.decoder_spec or settings.directions or settings.boundary_id is not None:
        raise NoStockModelError("no stock class has decoder_spec, directions or boundary_id")
    if model.main_input_name != "input_ids" or hasattr(model.config, "text_config"):
        raise NoStockModelError("only models of text alone are compared with stock classes")
    weights = [*model.parameters()]
    plain = [type(x) is nn.Parameter and x.is_floating_point() and not x.is_meta for x in weights]
    if not all(plain) or len({x.device for x in weights}) > 1:
        raise NoStockModelError("weights that are quantized, offloaded or spread are not compared")


def _name_stock_weights(model: PreTrainedModel, stacks: list[Stack]) -> dict[str, Tensor]:
    """Name all weights as the stock class does, its positions' too; leave out our record."""
    weights = model.state_dict()
    places = {module: f"{name}.".lstrip(".") for name, module in model.named_modules()}
    for stack in stacks:
        for owner in (stack.module, *stack.attentions):
            for ours, theirs in stack.weight_names.items():  # our names -> stock names
                if (weight := weights.pop(f"{places[owner]}{POSITIONS}.{ours}", None)) is None:
                    continue
                if "learned" in ours:  # rows before that of position 0 are padding's, or unused
                    weight = F.pad(weight, (0, 0, stack.first_row, 0))
                if "t5" in ours:  # ours is `(H, buckets)`
                    weight = weight.t().contiguous()
                weights[places[owner] + theirs] = weight
    return {name: weight for name, weight in weights.items() if not is_identity(name)}


def _list_classes(stock_class: Any) -> list[Any]:
    """List a model's stock class, and another one with the same head and names of weights."""
    config_class = stock_class.config_class
    if (other := _OTHERS.get(config_class.model_type)) is None:
        return [stock_class]
    mappings = [auto._model_mapping for auto in AUTO_CLASSES]
    with_head = [x for x in mappings if x.get(config_class, None) is stock_class]
    found = [x.get(CONFIG_MAPPING[other], None) for x in with_head[:1]]
    return [stock_class, *filter(None, found)]


def _build(stock_class: Any, model: PreTrainedModel, stacks: list[Stack]) -> PreTrainedModel:
    """Build a stock model that shares a model's weights; refuse a class that cannot have them."""
    positions: Any = stacks[0].module.get_submodule(POSITIONS)
    config = write_configuration(
        stock_class.config_class, model.config, positions.spec, positions.dims
    )
    with init_empty_weights():
        stock: PreTrainedModel = stock_class(config)
    try:
        stock.load_state_dict(_name_stock_weights(model, stacks), assign=True)
    except RuntimeError:
        raise NoStockModelError(f"{stock_class.__name__} has other weights") from None
    stock.tie_weights()  # `assign` replaced the tied parameters
    stock.to(model.device).eval()
    _compare(model, stock, stacks[0])
    if model.can_generate():
        stock.generation_config = model.generation_config
    return stock


@torch.no_grad()
def _compare(model: PreTrainedModel, stock: PreTrainedModel, stack: Stack) -> None:
    """Refuse a stock model whose outputs differ by too large a part of the largest output."""
    arguments = _draw_inputs(model, stack)
    was_training = model.training
    ours = _compute_outputs(model.eval(), arguments)
    model.train(was_training)
    try:
        theirs = _compute_outputs(stock, arguments)
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
    except RuntimeError:  # its code cannot compute what its configuration states
        difference = torch.inf
    # `eps` is the distance of 1 from the next number; 8 of them leave room in types of 16 bits.
    if not difference < max(_LARGEST_DIFFERENCE, 8 * torch.finfo(model.dtype).eps):  # or NaN
        raise NoStockModelError(f"outputs of {type(stock).__name__} differ by {difference:.0e}")


def _draw_inputs(model: PreTrainedModel, stack: Stack) -> dict[str, Tensor]:
    """Draw random tokens, 7 more than a window or 8: a row without padding, then padded ones."""
    positions = getattr(stack.module, POSITIONS)
    windows = [dict(item.options).get("size", 0) for item in positions.spec.items]  # 0: no window
    length = min(max(8, *windows) + 7, _LONGEST_INPUT, positions.dims.max_positions)
    padding = model.config.pad_token_id or 0
    symbols = model.get_input_embeddings().weight.size(0)
    tokens = torch.randint(1, symbols, (1, length), generator=torch.Generator().manual_seed(1))
    tokens = (tokens + padding) % symbols  # all but the padding
    has_encoder = stack.config.is_encoder_decoder
    by_ids = (
        stack.is_decoder_alone and "position_ids" in inspect.signature(model.forward).parameters
    )
    # The last row is padded on the left; other tables would count that padding, so they lack it.
    mask = torch.ones(3 if by_ids or has_encoder else 2, length, dtype=torch.long)
    mask[1, -3:], mask[2:, :3] = 0, 0
    arguments = {"input_ids": torch.where(mask.bool(), tokens, padding), "attention_mask": mask}
    if by_ids:  # as `generate` does
        arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if has_encoder:
        arguments["decoder_input_ids"] = tokens.expand_as(mask)
        arguments["decoder_attention_mask"] = torch.ones_like(mask)
    return {name: x.to(model.device) for name, x in arguments.items()}


def _compute_outputs(model: PreTrainedModel, arguments: dict[str, Tensor]) -> Tensor:
    """Compute logits or states of all tokens, ``(N, V)``; a model that generates, also by steps.

    N counts no padding. Of a model with one output for each text, N are the texts.
    """
    # Not by a call, which could be a compiled one.
    outputs: list[Tensor] = [model.forward(**arguments, return_dict=True)[0]]
    ids_name, mask_name = "input_ids", "attention_mask"
    if "decoder_input_ids" in arguments:
        ids_name, mask_name = "decoder_input_ids", "decoder_attention_mask"
    names = inspect.signature(model.forward).parameters
    cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
    if cache_name is not None and model.can_generate():
        length, cache, steps = arguments[ids_name].size(1), None, []
        # All tokens but two, which fill the cache, then one by one.
        for start, end in ((0, length - 2), (length - 2, length - 1), (length - 1, length)):
            new = {
                k: arguments[k][:, start:end] for k in (ids_name, "position_ids") if k in arguments
            }
            new[mask_name] = arguments[mask_name][:, :end]
            named = {**arguments, **new, cache_name: cache}
            out = model.forward(**named, use_cache=True, return_dict=True)
            cache = out[cache_name]
            steps.append(out[0])
        outputs.append(torch.cat(steps, 1))
    if outputs[0].dim() == 2:
        return outputs[0]
    return torch.cat([states[arguments[mask_name].bool()] for states in outputs])


def write_configuration(config_class: Any, config: Any, spec: Spec, dims: Dims) -> Any:
    """Write positions to a configuration of a stock class.

    Args:
        config_class: the stock class.
        config: the configuration of the model, of this class or another.
        spec: the positions.
        dims: sizes of the stack.

    Raises:
        NoStockModelError: the class cannot state them.
    """
    known = {field.name for field in fields(config_class)}
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    attending = [index for index, name in enumerate(types) if name in ATTENTION_TYPES]
    shares = [read_head_share(config, index) for index in attending]  # of the widest head's width
    layers = _describe_layers(spec, dims, shares)
    for index, layer in zip(attending, layers):
        types[index] = "sliding_attention" if layer["window"] else "full_attention"
    size = next((layer["window"] for layer in layers if layer["window"]), None)
    by_type = {types[i]: layer["rope"] for i, layer in zip(attending, layers) if layer["rope"]}
    softcap, buckets = (find_options(spec.layers[0], name) for name in ("softcap", "t5"))
    stated = {
        "layer_types": types,
        "use_sliding_window": size is not None,
        "no_rope_layers": [int(bool(layer["rope"])) for layer in layers],  # 1 if it rotates
        "layer_rope_theta": [layer["rope"].get("rope_theta", 0) for layer in layers],
        "rope_parameters": _join_by_type(config_class, by_type, dims),
        "attn_logit_softcapping": softcap.get("cap"),
        "relative_attention_num_buckets": buckets.get("num_buckets"),
        "relative_attention_max_distance": buckets.get("max_distance"),
    }
    if size is not None or "layer_types" not in known:  # else the present one has no effect
        both_sides = (size or 0) * (2 if dims.causal else 1)  # ModernBERT's, also of its decoder
        stated |= {"sliding_window": size, "local_attention": both_sides}
    if any(rope.get("rope_type") == "dynamic" for rope in by_type.values()):
        stated["max_position_embeddings"] = dims.trained_length
    is_same, ours = isinstance(config, config_class), (SPEC_FIELD, "auto_map")
    content = {
        name: value
        for name, value in config.to_dict().items()
        # A configuration also has values that are no fields, or fields under other names.
        if name in known or (is_same and name not in stated and not name.startswith(ours))
    }
    if not is_same:
        content["head_dim"] = dims.head_dim
    content |= {name: value for name, value in stated.items() if name in known}
    attention = {"attn_implementation": "eager"} if softcap else {}
    lacking = [shortened(str(spec))]
    try:
        stock = config_class.from_dict({**content, **attention})
        back = read_spec(stock)  # what the configuration states, whatever was written
    except (StrictDataclassError, KeyError, UserError):  # no such layers, or no such scaling
        pass
    else:
        if _describe_layers(back, dims, shares) == layers:
            vars(stock).update(attention)  # to be saved: transformers' sdpa leaves a cap out
            return stock
        read = {item.name for item in back.items}
        lacking = [str(item) for item in spec.items if item.name not in read] or lacking
    raise NoStockModelError(f"{config_class.__name__} cannot state {'+'.join(lacking)}")


def _describe_layers(spec: Spec, dims: Dims, shares: list[float]) -> list[dict[str, Any]]:
    """Describe each layer in a form that does not depend on how its positions are written.

    Keys: ``window``, a size or None; ``rope``, the ``rope_parameters`` with all defaults, or
    {}; with a rotation ``length``, that of the training, and ``others``, its further options;
    ``items``, the other encodings. ``shares``: widths of heads, 1 for the widest.
    """
    layers: list[dict[str, Any]] = []
    for index, share in enumerate(shares):
        items = (*spec.whole_stack, *spec.layers[index % len(spec.layers)])
        layer: dict[str, Any] = {"window": find_options(items, "window").get("size"), "rope": {}}
        if rope := find_options(items, "rope"):
            rope["fraction"] /= share  # a spec's fraction is of the widest head
            layer["rope"] = _write_rope(rope, items, dims)
            layer["length"] = getattr(rope["scaling"], "length", None) or dims.trained_length
            layer["others"] = {k: x for k, x in rope.items() if k not in ("base", "scaling")}
            items = tuple(item for item in items if item.name not in ("rope", "ministral3"))
        layers.append({**layer, "items": {*items}})
    return layers


def _write_rope(rope: dict[str, Any], layer: Items, dims: Dims) -> dict[str, Any]:
    """Write the options of a rotation as ``rope_parameters``, with the temperature of its layer."""
    scaling, base = rope["scaling"], rope["base"]
    written: dict[str, Any] = {"rope_type": "default"}
    if type(scaling) is Ntk:  # which transformers writes as another base
        base = scaling.scaled_base(base, int(rope["fraction"] * dims.head_dim), dims)
    elif scaling is not None:
        written = scaling.to_hf(dims)
        written.pop("max_position_embeddings", None)  # a field of its own
    if rope["sections"]:
        written["mrope_section"] = list(rope["sections"])
    # Some classes have another default. `proportional` has written its own.
    written.setdefault("partial_rotary_factor", rope["fraction"])
    if temperature := find_options(layer, "ministral3"):
        written[_TEMPERATURE] = temperature["beta"]
        written[TRAINED_LENGTH] = temperature["length"] or dims.trained_length
    return {**written, "rope_theta": base}


def _join_by_type(
    config_class: Any, by_type: dict[str, dict[str, Any]], dims: Dims
) -> dict[str, Any]:
    """Join the ``rope_parameters`` of types of layers as a class states them: by type, or once."""
    first = next(iter(by_type.values()), {"rope_type": "default", "rope_theta": 1e4})
    present = getattr(config_class(), "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in present.values()):
        return {name: by_type.get(name, first) for name in present}
    if _TEMPERATURE in present:  # 0 leaves the scores as they are
        return {_TEMPERATURE: 0.0, TRAINED_LENGTH: dims.trained_length, **first}
    return first
