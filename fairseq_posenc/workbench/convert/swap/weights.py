"""Transfers the weights of the source to the new model, and says what became of each position."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.checkpoints.state_dict_adapter import STOCK_SINUSOIDS
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import KEY, Identity, is_identity
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.specs import Item, Layer, Spec
from fairseq_posenc.workbench.convert.swap.position_parameters import (
    LengthRule,
    StackPair,
    find_source_values,
    name_in_source,
)
from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.pretrained import Pretrained


class StartWeights(NamedTuple):
    """The new model's parameters, and where they are from."""

    weights: dict[str, Tensor]  # all parameters by name
    kept: list[str]  # names of the source's parameters beside positions, as they are there
    permuted: list[str]  # names of those whose rows stand in another order
    positions: list[str]  # a line on each position parameter of the new model and of the source
    heads: list[str]  # names of the source's parameters beside its stacks; they are left out


def transfer_weights(source: Pretrained, model: Any, extend: Optional[LengthRule]) -> StartWeights:
    """Load the source's weights into a model that may have other positions.

    Args:
        source: the trained model.
        model: the new model, its parameters drawn; gets the weights.
        extend: rule for longer tables by position; None refuses them.

    Raises:
        UserError: the rest of the parameters is not the model's, or a table would be longer.
    """
    stacks = _pair_stacks(source, model)
    source_weights, heads = _rename_for_this_fairseq(source, model)
    own = dict(model.state_dict())
    kept = [name for name in source_weights if not _is_position_or_id(name)]
    shared = {name: value for name, value in own.items() if not _is_position_or_id(name)}
    _refuse_other_parameters(source, {name: source_weights[name] for name in kept}, shared)
    weights = {**own, **{name: source_weights[name] for name in kept}}
    permuted = {}
    for stack in stacks:
        permuted.update(permute_queries_and_keys(stack.prefix, stack.module, stack.spec, weights))
        weights[f"{stack.prefix}{KEY}"] = _combine_identities(stack, source_weights).to_tensor()
    accounts = []
    for name in filter(_is_position, own):
        stack = next(each for each in stacks if name.startswith(each.prefix))
        from_source, note = find_source_values(
            name, own[name], source_weights, source, stack, extend
        )
        weights[name] = own[name] if from_source is None else from_source
        fate = "new" if from_source is None else "mapped"
        accounts.append(f"{name} {tuple(own[name].shape)}: {fate}{note}")
    for name in source_weights:
        if _is_position(name) and name not in own:
            there = name_in_source(name, source)
            accounts.append(f"{there} {tuple(source.weights[there].shape)}: dropped")
    weights.update(permuted)
    model.load_state_dict(dict(weights))  # strict: fairseq's own check of names and shapes
    still = [name for name in kept if name not in permuted]
    return StartWeights(weights, still, list(permuted), accounts, heads)


def _pair_stacks(source: Pretrained, model: Any) -> list[StackPair]:
    names = {id(module): name for name, module in model.named_modules()}
    more = getattr(model, "positions_for_bos", 0)  # its tables may have room for <s> already
    return [
        StackPair(
            f"{names[id(stack)]}.",
            stack,
            source.specs[side],
            (source.positions[side], source.positions[side] + more),
        )
        for side, stack in list_stacks(model)
    ]


def _rename_for_this_fairseq(source: Pretrained, model: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the source's weights as today's fairseq does; list what has no stack."""
    heads = [n for n in source.weights if not n.startswith(("encoder.", "decoder."))]
    weights = {name: value for name, value in source.weights.items() if name not in heads}
    upgrade: Any = model.upgrade_state_dict
    upgrade(weights)
    return weights, heads


def _is_position(name: str) -> bool:
    return is_position_parameter(name) or name.endswith(STOCK_SINUSOIDS)


def _is_position_or_id(name: str) -> bool:
    return _is_position(name) or is_identity(name)


def _combine_identities(stack: StackPair, source_weights: Mapping[str, Tensor]) -> Identity:
    """Combine the settings of the source's weights with the positions of the new model.

    An encoding that the source had keeps the source's trained length, on which a scaling's ramp may
    depend.
    """
    state, now = source_weights.get(f"{stack.prefix}{KEY}"), stack.module.identity
    old = None if state is None else Identity.from_tensor(state)
    if old is not None:
        now = now._replace(weight_settings=old.weight_settings)
    both = {item.name for item in stack.spec.items} & {
        item.name for item in stack.module.assembly.spec.items
    }
    if not both - {"none"}:
        return now
    length = stack.positions[0] if old is None else old.trained_length
    return now._replace(trained_length=length)


def _refuse_other_parameters(
    source: Pretrained, source_weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    both = source_weights.keys() & own.keys()
    for names, what in (
        (own.keys() - both, "lacks"),
        (source_weights.keys() - both, "holds, unlike the start,"),
        ({n for n in both if source_weights[n].shape != own[n].shape}, "has other sizes in"),
    ):
        if names:
            raise UserError(
                f"{source.path}: it {what} {len(names)} parameters such as {min(names)}: its "
                "options do not describe it"
            )


def permute_queries_and_keys(
    prefix: str, stack: Any, old: Spec, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Reorder the weights of a stack's queries and keys for another layout of pairs.

    A score is a sum over a head's coordinates, so it stays the same if queries and keys are both
    reordered. A layout says which coordinates a rotation turns as a pair.

    Args:
        prefix: of the names of its parameters.
        stack: with the new positions.
        old: positions that the weights were trained with.
        weights: of the model.

    Raises:
        UserError: another encoding of the stack has vectors that queries or keys are multiplied by.
    """
    dims, spec = stack.assembly.dims, stack.assembly.spec
    attentions = ["self_attn"]
    if getattr(stack, "rotates_source", False):
        attentions.append("encoder_attn")
    permuted = {}
    for layer in range(len(stack.layers)):
        before, now = (_build_rotary(each, layer, dims) for each in (old, spec))
        if before is None or now is None or before.rotated != now.rotated:
            continue
        if before.layout == now.layout:
            continue
        _refuse_vectors_of_others(stack)
        index = torch.empty_like(now.order())
        index[now.order()] = before.order()
        for names in product(attentions, ("q_proj", "k_proj"), ("weight", "bias")):
            name = ".".join([f"{prefix}layers.{layer}", *names])
            rows = weights[name].unflatten(0, (dims.num_heads, -1))[:, index]  # [H, D, ...]
            permuted[name] = rows.flatten(0, 1)
    return permuted


def with_default_layouts(spec: Spec) -> Spec:
    """Give each rotation of a spec the layout that is its default."""

    def plain(layer: Layer) -> Layer:
        options = (dict(item.options) for item in layer)
        without = ({key: x for key, x in each.items() if key != "layout"} for each in options)
        return tuple(Item.canonical(item.name, each) for item, each in zip(layer, without))

    layers = tuple(map(plain, spec.layers))
    return Spec(plain(spec.whole_stack), layers).select_layers(range(len(layers)))


def _build_rotary(spec: Spec, layer: int, dims: Dims) -> Optional[Rope]:
    """Build the rotary encoding of a layer, if it has one."""
    for item in spec.select_layers([layer]).items:
        if issubclass(registry.get(item.name), Rope):
            (built,) = build_encodings({item.name: item}, dims).as_list()
            return cast(Rope, built)
    return None


def _refuse_vectors_of_others(stack: Any) -> None:
    """Refuse another order of coordinates where another encoding has vectors in the old one."""
    if not all(terms.content_only for terms in stack.assembly.check("auto")):
        raise UserError(
            f"{stack.assembly.spec}: the layout of pairs can change if other encodings add "
            "numbers to the scores, but not if they multiply vectors with queries or keys"
        )
