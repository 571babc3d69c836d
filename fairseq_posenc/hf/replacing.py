"""Replaces the positions of a model of transformers: builds the new modules and installs them."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import (
    OUR_ATTENTION,
    WITHOUT_POSITIONS,
    AttentionPositions,
    AttentionWithPositions,
)
from fairseq_posenc.hf.carry_over import PreviousPositions, copy_weights
from fairseq_posenc.hf.derived import add_mixin, refuse_replaced_forward
from fairseq_posenc.hf.families import FAMILIES, Family, Stack, find_family
from fairseq_posenc.hf.own_positions import (
    count_positions,
    explain_unservable,
    read_positions,
    write_length,
)
from fairseq_posenc.hf.own_spec import expand_own, names_own
from fairseq_posenc.hf.settings import POSITIONS, SPEC_FIELD, PositionSettings
from fairseq_posenc.hf.stack_forward import HFStackPositions, StackWithPositions
from fairseq_posenc.identity import parse_directions
from fairseq_posenc.position_parameters import LENGTH_RULES, LengthRule
from fairseq_posenc.registry import options
from fairseq_posenc.specs import Items, Spec, parse

logger = logging.getLogger(__name__)
_OLDEST = (5, 8)  # earlier versions of transformers fail in several families


def _find_supported_family(model: PreTrainedModel) -> Family:
    """Find the family of a model.

    Raises:
        UserError: the family, or this version of transformers, is not supported.
    """
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
        raise UserError(
            f"transformers {transformers.__version__} is not supported: install 5.8 or later"
        )
    family = find_family(type(model.config))
    if family is None:
        known = sorted(key for key in FAMILIES if key in CONFIG_MAPPING)
        reason = explain_unservable(model) or f"known types: {', '.join(known)}"
        raise UserError(
            f"models of type {model.config.model_type!r} cannot be given other positions: {reason}"
        )
    return family


def replace_positions(
    model: PreTrainedModel, settings: PositionSettings, extend: LengthRule | None
) -> None:
    """Replace the positions of a model: see :func:`fairseq_posenc.hf.set_positions`.

    Whatever can fail is done before the model is changed.
    """
    spec, max_positions, decoder_spec, directions, boundary_id = settings
    settings.check()
    if extend not in (None, *LENGTH_RULES):
        raise UserError(f"extend must be {' or '.join(LENGTH_RULES)}, not {extend!r}")
    stacks = _find_supported_family(model).find_stacks(model)
    length = max_positions or count_positions(model)
    if decoder_spec is not None and len(stacks) == 1:
        raise UserError("decoder_spec: this model has no encoder beside its decoder")
    present = getattr(stacks[0].module, POSITIONS, None)
    if present is not None and names_own(spec):
        directions = directions or present.directions
        boundary_id = present.boundary_id if boundary_id is None else boundary_id
    layers = len(stacks[0].attentions)
    sides = parse_directions(directions, "directions")
    if sides and stacks[0].causal:
        raise UserError("directions are for encoders: a decoder sees no later tokens")
    if len(sides) > layers:
        raise UserError(f"directions names {len(sides)} layers, but the encoder has {layers}")
    plans, notes, lost = [], [], []
    for stack, text, first in zip(stacks, (spec, decoder_spec or spec), (sides, [])):
        before = PreviousPositions.read(model, stack)
        if names_own(text):
            own_spec = str(before.spec) if before.spec else read_positions(model)
            if not hasattr(stack.module, POSITIONS):
                stack.check_rotations(parse(own_spec))
            text = expand_own(text, own_spec, len(stack.attentions))
        rest = ["lr" if stack.causal else "both"] * (len(stack.attentions) - len(first))
        plans.append(Plan.make(parse(text), stack, length, first + rest, boundary_id))
        notes += plans[-1].carry_over(before, extend)
        lost += plans[-1].list_lost_weights()
    for note in dict.fromkeys(notes):  # layers have equal notes
        logger.warning(note)
    is_built = hasattr(model.config, SPEC_FIELD) and not hasattr(stacks[0].module, POSITIONS)
    if lost and not is_built:  # else its weights are not yet there
        warnings.warn("set_positions: " + "; ".join(dict.fromkeys(lost)), stacklevel=3)
    # A model has one attention function: if a stack needs ours, all stacks use it.
    is_native = all(plan.positions.is_native for plan in plans)
    for plan in plans:
        plan.positions.is_native = is_native
    _copy_configurations(model)
    _choose_attention(model, plans)
    for plan in plans:
        plan.install()
    for module in model.modules():  # attention to an encoder's output, or of another encoder
        if hasattr(module, "is_causal") and not hasattr(module, POSITIONS):
            setattr(module, WITHOUT_POSITIONS, True)
    # Otherwise caches also have the encoder's keys, and all of these are needed.
    if stacks[0].is_decoder_alone and not stacks[0].is_hybrid:
        _limit_caches(stacks[0], plans[0].positions.assembly.spec)
    specs = [str(plan.positions.assembly.spec) for plan in plans]
    PositionSettings(
        spec=specs[0],
        max_positions=length,
        decoder_spec=specs[-1] if specs[-1] != specs[0] else None,
        directions=plans[0].positions.directions,
        boundary_id=boundary_id,
    ).write(model.config)
    for config in {id(x): x for x in (model.config, *(stack.config for stack in stacks))}.values():
        write_length(config, length)


class Plan(NamedTuple):
    """The modules of a stack's new positions, built before the model is changed."""

    stack: Stack
    positions: HFStackPositions
    layers: list[AttentionPositions]

    @classmethod
    def make(
        cls,
        spec: Spec,
        stack: Stack,
        max_positions: int,
        directions: list[str],
        boundary_id: int | None,
    ) -> Plan:
        """Build the modules, with new weights; refuse a spec that does not fit the stack."""
        attentions = stack.attentions
        for part in (stack.module, *attentions):
            refuse_replaced_forward(part)
        spec.check_length(len(attentions))
        if stack.is_hybrid and any(item.name == "documents" for item in spec.items):
            raise UserError(f"{spec}: layers of this model without attention would mix documents")
        if spec.rotates_source:
            raise UserError(
                f"{spec}: rope(cross_attention=true) is not served here: attention to an encoder "
                "is transformers' own"
            )
        weight = next(stack.module.parameters())
        # A model that is being loaded is on the device "meta", where constants cannot be computed.
        with torch.device("cpu" if weight.is_meta else weight.device):
            positions = HFStackPositions(spec, stack, max_positions, directions, boundary_id)
            _refuse_other_width(spec, positions, stack)
            assembly = positions.assembly
            # The terms of each kind of layer; native attention uses none of our backends.
            terms = assembly.draft_terms("auto" if positions.is_native else positions.backend)
            layers = []
            for index, is_rotated in enumerate(positions.is_rotated):
                kind = spec.layer_kind(index)
                has_decay = terms[kind].decay is not None
                reads = (terms[kind].decay, terms[kind].states, terms[kind].content_rows)
                layer = AttentionPositions(
                    encodings=assembly.build_layer(index),
                    family=stack.family,
                    dims=assembly.dims,
                    kind=kind,
                    direction=directions[index],
                    is_rotated=is_rotated,
                    reads_input=any(term is not None for term in reads),
                    # In the cache, the decay comes after the keys of all layers.
                    decay_place=len(stack.layers) + index if has_decay else None,
                    backend=positions.backend,
                )
                layers.append(layer)
        for module in (positions, *layers):
            module.to(stack.module.dtype)
        return cls(stack, positions, layers)

    def list_parts(self) -> list[tuple[nn.Module, HFStackPositions | AttentionPositions]]:
        """List the modules that get positions, the stack and its attentions, each with its own."""
        return [(self.stack.module, self.positions), *zip(self.stack.attentions, self.layers)]

    def install(self) -> None:
        """Put the modules into the stack, in place of its present positions."""
        self.stack.neutralize()
        for owner, part in self.list_parts():
            is_stack = owner is self.stack.module
            add_mixin(owner, StackWithPositions if is_stack else AttentionWithPositions)
            owner.add_module(POSITIONS, part.train(self.stack.module.training))

    def carry_over(self, before: PreviousPositions, extend: LengthRule | None) -> list[str]:
        """Copy the weights of the model's present positions that have the same meaning in the new.

        Args:
            before: the model's present positions.
            extend: how tables by position become longer; None leaves the rows beyond untrained.

        Returns:
            A note for the user about each weight that is not copied, or only in part.
        """
        spec = self.positions.assembly.spec
        notes = []
        for owner, part in self.list_parts():
            notes += copy_weights(part, self.stack.read_weights(owner), spec, before, extend)
        return notes

    def list_lost_weights(self) -> list[str]:
        """Say which trained weights the new positions lack, or lack since an earlier change."""
        present = getattr(self.stack.module, POSITIONS, None)
        earlier: set[str] = getattr(present, "lost_weights", set())
        lost: set[str] = set()
        here: set[str] = set()
        for owner, part in self.list_parts():
            trained, names = self.stack.read_weights(owner), dict(part.named_parameters())
            lost |= {name for name, x in trained.items() if name not in names and not x.is_meta}
            here |= {name for name in names if name not in trained}
        self.positions.lost_weights = (earlier | lost) - here
        taken = "trained weights are taken away, load the model again to have them back: "
        untrained = "weights are untrained, because an earlier call took them away: "
        return [
            text + ", ".join(sorted(names))
            for text, names in ((taken, lost), (untrained, earlier & here))
            if names
        ]


def _copy_configurations(model: PreTrainedModel) -> None:
    """Give a model its own configurations: others may have been built from the same."""
    copies: dict[int, object] = {}  # parts of the model that share one go on doing so
    for module in model.modules():
        config: Any = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            module.config = copy.deepcopy(config, copies)


def _choose_attention(model: PreTrainedModel, plans: list[Plan]) -> None:
    """Set a model's attention to our function, or to its own function if that is sufficient.

    Raises:
        UserError: the model's attention cannot be replaced.
    """
    positions = plans[0].positions  # all stacks have the same `stock` and `is_native`
    attention = positions.stock if positions.is_native else OUR_ATTENTION
    model.set_attn_implementation(attention)
    # transformers does not set it in models that compute attention themselves.
    if any(plan.stack.config._attn_implementation != attention for plan in plans):
        model.set_attn_implementation(positions.stock)
        raise UserError(
            f"models of type {model.config.model_type!r} compute attention themselves in "
            f"transformers {transformers.__version__}: install a later one"
        )


def _refuse_other_width(spec: Spec, positions: HFStackPositions, stack: Stack) -> None:
    """Refuse encodings of the input if embeddings are not as wide as layers, as in some of OPT."""
    width = stack.module.get_input_embeddings().embedding_dim
    expected = stack.config.hidden_size
    if positions.input is not None and width != expected:
        raise UserError(
            f"{spec}: the embeddings of this model have {width} channels, and its layers "
            f"{expected}: take encodings of the scores or rotations"
        )


def _limit_caches(stack: Stack, spec: Spec) -> None:
    """Write the windows of a spec to the configuration, by which transformers makes caches.

    Caches then drop the keys of a layer that no later query can see.
    """
    config = stack.config
    sizes = [_find_window(layer) for layer in spec.layers]
    if any(sizes):
        config.sliding_window = max(sizes)  # transformers' caches have one size for all layers
    elif getattr(config, "sliding_window", None) and not _masks_by_type(config):
        config.sliding_window = None
    if hasattr(config, "use_sliding_window"):  # Qwen forgets the size on loading, unless it is true
        config.use_sliding_window = any(sizes)
    # The types of the previous positions may name windows that the new ones do not have.
    if any(sizes) or getattr(config, "layer_types", None):
        types = ["sliding_attention" if size else "full_attention" for size in sizes]
        config.layer_types = [types[i % len(types)] for i in range(config.num_hidden_layers)]
    if any(sizes) and hasattr(stack.module, "has_sliding_layers"):
        # Only if this is true do such models make the mask that layers of this type ask for.
        stack.module.has_sliding_layers = True


def _masks_by_type(config: PretrainedConfig) -> bool:
    """Check, by ``layer_types``, whether a model makes a mask for each type, and needs a window."""
    return any("layer_types" in inspect.signature(cls).parameters for cls in type(config).__mro__)


def _find_window(layer: Items) -> int:
    """Find the number of last keys that a layer needs; 0 if it needs all, or the first, too."""
    default = options("window")["size"].default
    windows = [dict(item.options) for item in layer if item.name == "window"]
    sizes = [window.get("size", default) for window in windows if "first" not in window]
    return min(sizes, default=0)
