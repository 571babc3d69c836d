"""Replaces the positions of a transformers model.

A model has one or two stacks of layers, an encoder and a decoder. For each stack, all new modules
are built first, with the trained weights that they keep, so a refused call leaves the model as it
was. Then they are installed, in place of the present positions, and the configuration states them.
``own`` in a spec means the model's present positions.
"""

import copy
import warnings
from dataclasses import fields
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from fairseq_posenc import assembly
from fairseq_posenc.derived import add_mixin, refuse_replaced_forward
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import own_positions
from fairseq_posenc.hf.attention import AttentionPositions, AttentionWithPositions
from fairseq_posenc.hf.families import FAMILIES, Family, Stack, find_family
from fairseq_posenc.hf.settings import OUR_ATTENTION, POSITIONS, SPEC_FIELD, PositionSettings
from fairseq_posenc.hf.stack_forward import HFStackPositions, StackWithPositions
from fairseq_posenc.hf.stand_ins import OWN_CODE, WITHOUT_POSITIONS
from fairseq_posenc.own_specs import expand_own, find_doubts, names_own
from fairseq_posenc.position_parameters import LENGTH_RULES, LengthRule, copy_parameters
from fairseq_posenc.specs import Spec, parse

# New positions by the modules that get them: the HFStackPositions of a stack's own module, then the
# AttentionPositions of each of its attention modules.
Parts = dict[nn.Module, Any]


def replace_positions(
    model: PreTrainedModel, settings: PositionSettings, extend: LengthRule | None
) -> None:
    """Replace the positions of a model: see :func:`fairseq_posenc.hf.set_positions`."""
    settings.check(model.config)  # refuses wrong types, and stock fields that were changed
    if extend not in (None, *LENGTH_RULES):
        raise UserError(f"extend must be {' or '.join(LENGTH_RULES)}, not {extend!r}")
    stacks = _find_supported_family(model).find_stacks(model)
    if settings.decoder_spec is not None and len(stacks) == 1:
        raise UserError("decoder_spec: only one stack of this model has positions, by spec")
    earlier = getattr(stacks[0].module, POSITIONS, None)  # if positions were set already
    if earlier is not None and names_own(settings.spec):  # `own` also keeps these two
        settings = settings._replace(directions=settings.directions or earlier.directions)
        if settings.boundary_id is None:
            settings = settings._replace(boundary_id=earlier.boundary_id)
    old_length = own_positions.count_positions(model)
    parts: Parts = {}
    notes: list[str] = []
    max_positions = settings.max_positions or old_length
    # A model of a single stack takes the first of the two specs, whichever stack it is.
    for stack, text in zip(stacks, (settings.spec, settings.decoder_spec or settings.spec)):
        old_spec, new_spec = _read_specs(stack, text)
        directions = settings.directions if stack is stacks[0] else ""  # not of a second stack
        new = _build_parts(new_spec, stack, max_positions, directions, settings.boundary_id)
        notes += _copy_weights(stack, new, old_spec, old_length, extend)
        notes += find_doubts(text, new_spec, old_spec or parse("none"), len(stack.attentions))
        parts |= new
    has_weights = earlier is not None or not hasattr(model.config, SPEC_FIELD)
    if notes and has_weights:  # else its constructor called this, and weights are loaded later
        # Layers have equal notes. The warning names the line that called `set_positions`.
        warnings.warn("set_positions: " + "; ".join(dict.fromkeys(notes)), stacklevel=3)
    _install(model, stacks, parts)  # also copies the configurations, which change below
    first, last = parts[stacks[0].module], parts[stacks[-1].module]  # an encoder is the first
    # With an encoder, caches also have all of its keys, which a window must not drop.
    if stacks[0].is_decoder_alone:
        _limit_caches(stacks[0], first.spec)
    decoder_spec = None if last.spec == first.spec else str(last.spec)
    settings = settings._replace(spec=str(first.spec), max_positions=max_positions)
    settings._replace(decoder_spec=decoder_spec, directions=first.directions).write(model.config)
    for config in (model.config, *(stack.config for stack in stacks)):
        own_positions.write_length(config, max_positions)


def _find_supported_family(model: PreTrainedModel) -> Family:
    """Find the family of a model; refuse an unknown one, and old versions of transformers."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):  # some families fail
        raise UserError(f"install transformers 5.8 or later, not {transformers.__version__}")
    if (family := find_family(type(model.config))) is None:
        known = sorted(key for key in FAMILIES if key in CONFIG_MAPPING)
        reason = own_positions.explain_unservable(model) or f"known types: {', '.join(known)}"
        raise UserError(
            f"models of type {model.config.model_type!r} cannot be given other positions: {reason}"
        )
    return family


def _read_specs(stack: Stack, text: str) -> tuple[Spec | None, Spec]:
    """Read the present spec of a stack, None if no spec describes it, and parse the new one."""
    if names_own(text):
        count = len(stack.attentions)  # the last layers may have been removed
        old_spec = own_positions.read_spec(stack.module).select_layers(range(count))
        stack.refuse_other_layers(old_spec)  # if others were removed, or some added
        return old_spec, expand_own(text, old_spec, count)
    new_spec = parse(text)
    try:
        return own_positions.read_spec(stack.module), new_spec
    except UserError:
        return None, new_spec


def _build_parts(
    spec: Spec, stack: Stack, max_positions: int, directions: str, boundary_id: int | None
) -> Parts:
    """Build the new positions of a stack, with new weights: see :class:`HFStackPositions`."""
    _refuse_unfit(spec, stack)
    weight = next(stack.module.parameters())
    # A model that is being loaded is on the device "meta", where constants cannot be computed.
    with torch.device("cpu" if weight.is_meta else weight.device):
        positions = HFStackPositions(spec, stack, max_positions, directions, boundary_id)
        _refuse_layers_that_differ(positions, stack)
        parts: Parts = {stack.module: positions}
        for index, attention in enumerate(stack.attentions):
            parts[attention] = AttentionPositions(positions, index)
    for owner, part in parts.items():
        refuse_replaced_forward(owner)
        part.to(stack.module.dtype)
    return parts


def _refuse_unfit(spec: Spec, stack: Stack) -> None:
    """Refuse a spec that a stack cannot have."""
    spec.check_length(len(stack.attentions))
    if spec.is_causal_only and not stack.causal and stack.config.is_encoder_decoder:
        raise UserError(f"{spec} is for causal models: an encoder-decoder takes it as decoder_spec")
    if stack.is_hybrid and "documents" in spec.names:
        raise UserError(f"{spec}: layers of this model without attention would mix documents")
    if spec.rotates_source:
        raise UserError(f"{spec}: leave out cross_attention: cross-attention has no rope here")
    # In some models of OPT, embeddings are projected to the width of the layers.
    width = stack.module.get_input_embeddings().embedding_dim
    if spec.input_items and width != stack.config.hidden_size:
        raise UserError(
            f"{spec}: the embeddings of this model have {width} channels, and its layers "
            f"{stack.config.hidden_size}: use encodings of the scores or rotations"
        )
    if spec.input_items and getattr(stack.config, "hidden_size_per_layer_input", None):
        raise UserError(f"{spec}: this model finds tokens by their embeddings: add no vectors")


def _refuse_layers_that_differ(positions: HFStackPositions, stack: Stack) -> None:
    """Refuse positions that not all layers can have, as in Gemma 4, whose layers differ."""
    spec, dims, layers = positions.spec, positions.dims, positions.layer_plans
    projects = any(x.rows("layer") is not None for x in assembly.draft_terms(spec, dims, "auto"))
    keys: dict[str, int] = {}  # by type of layer, the kind of the last one with keys of its own
    for index, (attention, plan) in enumerate(zip(stack.attentions, layers)):
        layer_type = getattr(attention, "layer_type", "")
        if not getattr(attention, "is_kv_shared_layer", False):
            keys[layer_type] = plan.kind
        elif keys.get(layer_type) != plan.kind or projects:
            raise UserError(
                f"{spec}: layer {index} of this model has no keys of its own: it must have the "
                "positions of the layer whose keys it reads, and can project no rows of a table"
            )
    heads = sorted({*(getattr(stack.config, "num_attention_heads_per_layer", None) or ())})
    if len(heads) > 1 and not positions.can_keep_attention:
        raise UserError(
            f"{spec}: layers of this model have different numbers of heads, "
            f"{' and '.join(map(str, heads))}: use rotations alone"
        )
    widths = sorted({plan.head_dim for plan in layers})
    dims_by_width = [dims._replace(own_head_dim=width) for width in widths]
    counts = [assembly.count_parameters(spec, x, len(spec.layers)) for x in dims_by_width]
    if len(widths) > 1 and not (positions.rotates_all and all(x == counts[0] for x in counts)):
        raise UserError(
            f"{spec}: heads of this model are {' and '.join(map(str, widths))} wide, by layer: "
            "use own, or encodings without rotations and tables of this width, such as alibi"
        )


def _install(model: PreTrainedModel, stacks: list[Stack], parts: Parts) -> None:
    """Put the new modules into a model, in place of its present positions."""
    # A model has one attention function: its own, if that can serve all stacks, or ours.
    can_keep = all(parts[stack.module].can_keep_attention for stack in stacks)
    attention = parts[stacks[0].module].stock_attention if can_keep else OUR_ATTENTION
    copies: dict[int, object] = {}  # parts of the model that share one keep sharing it
    for module in model.modules():  # other models may share their configurations
        config: Any = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            module.config = copy.deepcopy(config, copies)
    if not (can_keep or all(stack.module._can_set_attn_implementation() for stack in stacks)):
        raise UserError(f"{type(model).__name__} {OWN_CODE}")
    for module in (model, *(stack.module for stack in stacks)):
        module.set_attn_implementation(attention)
    for stack in stacks:
        stack.neutralize()  # removes the stack's own positions
    for owner, part in parts.items():
        is_stack = isinstance(part, HFStackPositions)
        add_mixin(owner, StackWithPositions if is_stack else AttentionWithPositions)
        owner.add_module(POSITIONS, part.train(owner.training))
        for module in part.modules():  # else a model that is built around this one redraws it
            module._is_hf_initialized = True
    # Our attention function accepts other attention, as to an encoder's output, only by this mark.
    for module in model.modules():
        if hasattr(module, "is_causal") and not hasattr(module, POSITIONS):  # all attention has it
            setattr(module, WITHOUT_POSITIONS, True)


def _limit_caches(stack: Stack, spec: Spec) -> None:
    """Write the windows of a spec to the configuration, by which transformers makes caches.

    Caches then drop the keys of a layer that no later query can see.
    """
    config = stack.config
    known = {field.name for field in fields(config)}
    masks_by_type = "layer_types" in known  # then only layers of a type with windows read a size
    if masks_by_type and not known & {"sliding_window", "local_attention"}:
        return  # a hybrid: no field for a window, and types that say which layers attend
    # Of each layer of the spec; they repeat over the stack, whose layers all have attention here.
    windows = [{x.name: x.all_options for x in layer}.get("window") for layer in spec.layers]
    # How many last keys each cache must keep; None: all. With `prefill`, later tokens see all keys.
    sizes = [x["size"] if x and x["first"] is None and not x["prefill"] else None for x in windows]
    largest = max(filter(None, sizes), default=None)
    if masks_by_type and getattr(config, "is_heterogeneous", False):  # Gemma 4: widths by type
        sliding = [x for x, name in zip(cycle(sizes), config.layer_types) if "sliding" in name]
        all_keys = 2**31 - 1
        config.sliding_window = max((size or all_keys for size in sliding), default=all_keys)
        return
    if largest or (getattr(config, "sliding_window", None) and not masks_by_type):
        config.sliding_window = largest  # one for all layers
    if hasattr(config, "use_sliding_window"):  # Qwen forgets the size on loading, unless it is true
        config.use_sliding_window = largest is not None
    # The types of the previous positions may name windows that the new ones do not have.
    if largest or getattr(config, "layer_types", None):
        types = cycle("sliding_attention" if size else "full_attention" for size in sizes)
        config.layer_types = [*islice(types, config.num_hidden_layers)]
    if largest and hasattr(stack.module, "has_sliding_layers"):
        # Only if this is true do such models make the mask that layers of this type ask for.
        stack.module.has_sliding_layers = True


def _copy_weights(
    stack: Stack, parts: Parts, old_spec: Spec | None, old_length: int, extend: LengthRule | None
) -> list[str]:
    """Copy the weights of a stack that keep their meaning to its new positions, ``parts``.

    ``old_spec`` is None if no spec describes the present ones, of ``old_length`` positions.
    ``extend`` is how tables by position become longer; None leaves the rows beyond untrained.

    Returns:
        A note for the user about each weight that is lost, not copied, or only in part.
    """
    earlier = getattr(stack.module, POSITIONS, None)  # if None, missing weights are normal
    was_causal = earlier.dims.causal if earlier else stack.is_decoder  # T5's buckets differ by it
    notes, new_spec = [], parts[stack.module].spec
    for owner, part in parts.items():
        # By the names that they have in `part`, without those that are loaded later.
        trained = {name: x for name, x in stack.read_weights(owner).items() if not x.is_meta}
        names_of_part = dict(part.named_parameters()).keys()  # such as `shared.t5.table`
        lost = "removed; if it was trained, load the model again to get it back"
        notes += [f"{name}: {lost}" for name in sorted(trained.keys() - names_of_part)]
        lacking = sorted(names_of_part - trained.keys()) if earlier else []
        notes += [f"{x}: untrained, as the previous positions lack it" for x in lacking]
        notes += copy_parameters(part, trained, old_spec, new_spec, old_length, extend, was_causal)
    return notes
