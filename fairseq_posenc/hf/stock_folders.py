"""Finds the stock transformers model that computes the same as a model with positions.

Its folder needs nothing of this package: scripts and servers read it as any other. A stock model is
used only if its configuration states the model's spec, its weights are the same by name and shape,
and it computes the same from random tokens, padded and with a cache. :func:`write_configuration` is
the inverse of reading a configuration, in :mod:`~fairseq_posenc.hf.own_positions`.
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
from transformers import Cache, PreTrainedModel

from fairseq_posenc.derived import with_attributes
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import write_rope
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.families import AFTER_PADDING, Stack, find_family
from fairseq_posenc.hf.own_positions import ATTENTION_TYPES, read_head_share, read_spec
from fairseq_posenc.hf.settings import POSITIONS, SPEC_FIELD, PositionSettings
from fairseq_posenc.identity import is_identity
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.specs import Spec

_LARGEST_DIFFERENCE = 2e-5  # as a part of the largest output: room for float32's rounding
_LONGEST_INPUT = 1024  # tokens; of a wider window, only the size in the configuration is compared
_TEMPERATURE = "llama_4_scaling_beta"  # of Ministral 3, in its `rope_parameters`
# Models -> others with weights of the same names, and with windows or layers without positions.
_OTHERS = {"Cohere": "Cohere2", "Dots1": "ExaoneMoe", "Olmo2": "Olmo3", "SeedOss": "Qwen2"}
_LLAMAS = "Cwm Ernie4_5 Helium Llama Ministral Ministral3 Mistral"
_OTHERS |= dict.fromkeys(_LLAMAS.split(), "SmolLM3")


class NoStockModelError(Exception):
    """No stock model computes the same as a model; the message says why."""


def find_stock_model(model: Any) -> PreTrainedModel:
    """Build the stock model that computes the same as a model whose positions were set.

    It shares the weights of the model. Its class may be another one with weights of the same names
    and shapes: SmolLM3 has those of Llama, and layers without positions. A NoStockModelError says
    why there is no such model, or none that can be compared.
    """
    stacks = find_family(type(model.config)).find_stacks(model)  # type: ignore[union-attr]
    settings = PositionSettings.read(model.config)
    if settings.decoder_spec or settings.directions or settings.boundary_id is not None:
        raise NoStockModelError("no stock class has decoder_spec, directions or boundary_id")
    if model.main_input_name != "input_ids" or hasattr(model.config, "text_config"):
        raise NoStockModelError("models that read more than text are not compared with stock ones")
    if "window" in settings.spec and model.can_generate() and not stacks[-1].causal:
        raise NoStockModelError("caches of windows without causality are not compared")
    weights = [*model.parameters()]
    plain = [type(x) is nn.Parameter and x.is_floating_point() and not x.is_meta for x in weights]
    if not all(plain) or len({x.device for x in weights}) > 1:
        raise NoStockModelError("weights that are quantized, offloaded or spread are not compared")
    stock_class = type(model).stock  # from which `derive` has made it
    name = stock_class.config_class.__name__.removesuffix("Config")
    other = stock_class.__name__.replace(name, _OTHERS.get(name, name))  # with the same head
    reasons = []
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would warn of configurations that are tried
    try:
        for candidate in dict.fromkeys([stock_class, getattr(transformers, other, stock_class)]):
            try:
                return _build(candidate, model, stacks)
            except NoStockModelError as reason:
                reasons.append(str(reason))
    finally:
        transformers.logging.set_verbosity(verbosity)
    raise NoStockModelError("; ".join(reasons))


def _name_stock_weights(model: Any, stacks: list[Stack], stock: Any) -> dict[str, Tensor]:
    """Name all weights as the stock class does, also those of positions, but not our record."""
    weights = model.state_dict()
    prefixes = {module: f"{name}.".lstrip(".") for name, module in model.named_modules()}
    for stack in stacks:
        if stack.family.sinusoids == "half":  # a parameter in the stock class, which computes it
            table = stock.get_submodule(path := prefixes[stack.module] + stack.family.table)
            weights[f"{path}.weight"] = table.create_weight()
        for owner in (stack.module, *stack.attentions):
            for ours, theirs in stack.weight_names.items():  # our names -> stock names
                if (weight := weights.pop(f"{prefixes[owner]}{POSITIONS}.{ours}", None)) is None:
                    continue
                if "learned" in ours:  # rows before that of position 0 are padding's, or unused
                    weight = F.pad(weight, (0, 0, stack.first_row, 0))
                if "t5" in ours:  # ours is `(H, buckets)`
                    weight = weight.t().contiguous()
                weights[prefixes[owner] + theirs] = weight
    return {name: weight for name, weight in weights.items() if not is_identity(name)}


def _build(stock_class: Any, model: PreTrainedModel, stacks: list[Stack]) -> PreTrainedModel:
    """Build a stock model that shares a model's weights; refuse a class that cannot have them."""
    positions = getattr(stacks[0].module, POSITIONS)
    config = write_configuration(stock_class.config_class, model.config, positions)
    with init_empty_weights():
        stock: PreTrainedModel = stock_class._from_config(config, dtype=model.dtype)
    try:
        stock.load_state_dict(_name_stock_weights(model, stacks, stock), assign=True)
    except RuntimeError as error:
        other = shortened(str(error).splitlines()[-1].strip())  # such as `Missing key(s) in ...`
        raise NoStockModelError(f"{stock_class.__name__} has other weights: {other}") from None
    stock.tie_weights()  # `assign` replaced the tied parameters
    stock.to(model.device).eval()
    _compare(model, stock, stacks[0])
    if model.can_generate():
        stock.generation_config = model.generation_config
    return stock


@torch.no_grad()
def _compare(model: PreTrainedModel, stock: PreTrainedModel, stack: Stack) -> None:
    """Refuse a stock model whose outputs differ by too large a part of the largest output.

    Where its head takes other inputs, such as several choices, the base models are compared.
    """
    inputs, name = _draw_inputs(model, stack), type(stock).__name__
    try:
        theirs = _compute_outputs(stock, inputs)
    except (RuntimeError, ValueError):
        # Heads are then not run, so their weights are compared, which tying may have replaced.
        weights, has_head = model.state_dict(), stock is not stock.base_model
        are_equal = all(torch.equal(x, weights.get(k, x)) for k, x in stock.state_dict().items())
        if model.can_generate() or not (has_head and are_equal):
            raise NoStockModelError(f"{name} cannot compute what is compared") from None
        return _compare(model.base_model, stock.base_model, stack)
    with with_attributes((part, "training", False) for part in model.modules()):  # else dropout
        ours = _compute_outputs(model, inputs)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    # `eps` is the distance of 1 from the next number; 8 of them leave room in types of 16 bits.
    if not difference < max(_LARGEST_DIFFERENCE, 8 * torch.finfo(model.dtype).eps):  # or NaN
        raise NoStockModelError(f"outputs of {name} differ by {difference:.0e}")


def _draw_inputs(model: PreTrainedModel, stack: Stack) -> dict[str, Tensor]:
    """Draw random tokens, 7 beyond the widest window (or 8): an unpadded row, then padded ones."""
    positions = getattr(stack.module, POSITIONS)
    windows = [x.all_options["size"] for x in positions.spec.items if x.name == "window"]
    length = min(max([8, *windows]) + 7, _LONGEST_INPUT, positions.dims.max_positions)
    padding = model.config.pad_token_id or 0
    symbols = model.get_input_embeddings().weight.size(0)
    tokens = torch.randint(1, symbols, (1, length), generator=torch.Generator().manual_seed(1))
    tokens = (tokens + padding) % symbols  # all but the padding
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, -3:], mask[2, :3] = 0, 0
    family, others = stack.family, {}
    if stack.is_decoder_alone and "position_ids" in inspect.signature(model.forward).parameters:
        others = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # as `generate` does
    elif family.table and family.first_row != AFTER_PADDING and family.sinusoids != "fairseq":
        mask = mask[:2]  # the stock class would count the padding on the left
    if stack.config.is_encoder_decoder:
        others = {"decoder_input_ids": tokens.expand_as(mask)}
        others["decoder_attention_mask"] = torch.ones_like(mask)
    inputs = {"input_ids": torch.where(mask.bool(), tokens, padding), "attention_mask": mask}
    return {name: x.to(model.device) for name, x in (inputs | others).items()}


def _compute_outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Compute logits or states of all tokens but padding, ``(N, V)``.

    A model that generates also computes them with a cache, the last two tokens one by one. Of a
    model with one output for each text, N are the texts.
    """
    prefix = "decoder_" if "decoder_input_ids" in inputs else ""
    names = {f"{prefix}input_ids", "position_ids"} & inputs.keys()
    mask = inputs[f"{prefix}attention_mask"]
    length = mask.size(1)
    outputs = []
    for sizes in [[length], [length - 2, 1, 1]] if model.can_generate() else [[length]]:
        cached: dict[str, Any] = {"use_cache": True} if len(sizes) > 1 else {}
        parts = []
        for tokens in torch.arange(length).split(sizes):
            step = {name: inputs[name][:, tokens] for name in names}
            step[f"{prefix}attention_mask"] = mask[:, : tokens[-1] + 1]
            # Not by a call, which could be a compiled one.
            output = model.forward(**{**inputs, **step}, **cached, return_dict=True)
            cached |= {name: x for name, x in output.items() if isinstance(x, Cache)}
            if cached.keys() == {"use_cache"}:  # it asked for one, and got none
                raise NoStockModelError(f"{type(model).__name__} returns no cache to compare")
            parts.append(output[0])
        states = torch.cat(parts, 1)
        outputs.append(states[mask.bool()] if states.shape[:2] == mask.shape else states)
    return torch.cat(outputs)


def write_configuration(config_class: Any, config: Any, positions: StackPositions) -> Any:
    """Write positions to a stock class's configuration; NoStockModelError if it lacks a field."""
    spec, dims = positions.spec, positions.dims
    known = {field.name for field in fields(config_class)}
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    attending = [index for index, name in enumerate(types) if name in ATTENTION_TYPES]
    shares = [read_head_share(config, index) for index in attending]  # of the widest head
    layers = _list_options(spec, dims, shares)  # for each layer with attention: name -> options
    ropes = [dict(layer.get("rope_parameters", {})) for layer in layers]  # {}: no rotation
    for index, layer in zip(attending, layers):
        types[index] = "sliding_attention" if "window" in layer else "full_attention"
    size = next((layer["window"]["size"] for layer in layers if "window" in layer), None)
    by_type = {types[index]: rope for index, rope in zip(attending, ropes) if rope}  # last wins
    softcap, buckets = (layers[0].get(name, {}) for name in ("softcap", "t5"))
    stated = {  # the spec in fields of stock classes, of which a class has some
        "layer_types": types,
        "use_sliding_window": size is not None,
        "no_rope_layers": [int(bool(rope)) for rope in ropes],  # 1 if it rotates
        "layer_rope_theta": [rope.get("rope_theta", 0) for rope in ropes],
        "rope_parameters": _join_ropes(config_class, by_type, dims),
        "attn_logit_softcapping": softcap.get("cap"),
        "relative_attention_num_buckets": buckets.get("num_buckets"),
        "relative_attention_max_distance": buckets.get("max_distance"),
    }
    if size is not None or "layer_types" not in known:  # else no layer reads the present size
        both_sides = (size or 0) * (2 if dims.causal else 1)  # a causal spec's size counts one side
        stated |= {"sliding_window": size, "local_attention": both_sides}
    if any(rope.get("rope_type") == "dynamic" for rope in ropes):
        stated["max_position_embeddings"] = dims.trained_length  # other types have a key for it
    is_same, our_prefixes = isinstance(config, config_class), (SPEC_FIELD, "auto_map")
    content = {  # the model's own values, of which `stated` then replaces some
        name: value
        for name, value in config.to_dict().items()
        # A configuration also has values that are no fields, or fields under other names.
        if name in known or (is_same and name not in stated and not name.startswith(our_prefixes))
    }
    if not is_same:
        content["head_dim"] = dims.head_dim
    content |= {name: value for name, value in stated.items() if name in known}
    attention = {"attn_implementation": "eager"} if softcap else {}
    unfit = [shortened(str(spec))]
    try:
        stock = config_class.from_dict({**content, **attention})
        back = read_spec(stock)  # what the configuration states, whatever was written
    except (StrictDataclassError, KeyError, UserError):  # no such layers, or no such scaling
        pass
    else:
        if _list_options(back, dims, shares) == layers:
            vars(stock).update(attention)  # to be saved: transformers' sdpa leaves a cap out
            return stock
        unfit = [str(x) for x in spec.items if x.name not in back.names] or [f"{spec}, only {back}"]
    raise NoStockModelError(f"{config_class.__name__} cannot state {'+'.join(unfit)}")


def _list_options(spec: Spec, dims: Dims, shares: list[float]) -> list[dict[str, dict[str, Any]]]:
    """List the options of all encodings in each layer, by name, in a form that can be compared.

    Defaults are filled in. What ``rope_parameters`` state is under that name. ``shares`` are the
    widths of the heads of each layer, as parts of the widest.
    """
    layers = []
    for index, share in enumerate(shares):
        items = (*spec.whole_stack, *spec.layers[index % len(spec.layers)])  # they repeat
        layer = {item.name: dict(item.all_options) for item in items}  # copies, changed below
        if rope := layer.get("rope"):
            written = layer["rope_parameters"] = write_rope(rope, dims, share)
            del rope["base"], rope["scaling"]  # which are in what was written
            # `dynamic` writes its length, too, which in configurations is a field of its own.
            rope["max_position_embeddings"] = written.pop("max_position_embeddings", None)
        if ministral3 := layer.get("ministral3"):
            ministral3["length"] = ministral3["length"] or dims.trained_length
            if rope:
                written |= {_TEMPERATURE: ministral3["beta"], TRAINED_LENGTH: ministral3["length"]}
        layers.append(layer)
    return layers


def _join_ropes(config_class: Any, ropes: dict[str, dict[str, Any]], dims: Dims) -> dict[str, Any]:
    """Join the ``rope_parameters`` of types of layers as a class states them: by type, or once."""
    first = next(iter(ropes.values()), {"rope_type": "default", "rope_theta": 1e4})
    present = getattr(config_class(), "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in present.values()):
        return {name: ropes.get(name, first) for name in present}
    if _TEMPERATURE in present:  # 0 leaves the scores as they are
        return {_TEMPERATURE: 0.0, TRAINED_LENGTH: dims.trained_length, **first}
    return first
