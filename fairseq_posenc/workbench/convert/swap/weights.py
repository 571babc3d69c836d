"""Transfers the weights of the source to the new model, and describes where each comes from.

Position parameters that both have keep their values; tables may become longer. *Rows by position*
belong to position 0, 1, 2 and so on, rows *by distance* to the distance of a key from its query.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple, Optional, cast

from torch import Tensor

from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.checkpoints.state_dict_adapter import (
    LEARNED_TABLE,
    STOCK_OFFSET,
    STOCK_SINUSOIDS,
    STOCK_TABLE,
)
from fairseq_posenc.encodings.base import Dims, Encoding
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import STATE_KEY, Identity, is_identity
from fairseq_posenc.position_parameters import (
    KEY_MARK,
    LENGTH_RULES,
    LengthRule,
    extend_parameter,
    is_position_parameter,
    list_changed_options,
)
from fairseq_posenc.specs import Item, Items, Spec
from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.pretrained import Pretrained


class StackPair(NamedTuple):
    """A stack of the new model, and the positions of the same stack in the source."""

    prefix: str  # beginning of the names of its parameters
    module: Any  # the new stack
    spec: Spec  # position encodings of the source
    # numbers of positions for which the source's tables may have rows: that of its options, and
    # for a causal LM that was trained with `<s>` before its samples, one more
    table_lengths: tuple[int, int]


class StartWeights(NamedTuple):
    """The new model's parameters, and where they come from."""

    weights: dict[str, Tensor]  # all parameters by name
    kept: list[str]  # names of parameters, other than positions, that are the source's
    permuted: list[str]  # names of parameters whose rows were reordered
    positions: list[str]  # a line about each position parameter of the new model or the source
    heads: list[str]  # names of the source's parameters outside its stacks, which are left out


def transfer_weights(source: Pretrained, model: Any, extend: Optional[LengthRule]) -> StartWeights:
    """Load the source's weights into a model that may have other positions.

    Args:
        source: the trained model.
        model: the new model, with initial parameters; gets the weights.
        extend: how tables by position are made longer; None refuses it.

    Raises:
        UserError: parameters other than positions differ, or a table would be longer.
    """
    stacks = _pair_stacks(source, model)
    heads = [name for name in source.weights if not name.startswith(("encoder.", "decoder."))]
    source_weights = {name: x for name, x in source.weights.items() if name not in heads}
    model.upgrade_state_dict(source_weights)  # renames parameters to today's names, in place
    model_state = dict(model.state_dict())
    kept_weights = _without_positions(source_weights)
    _refuse_other_parameters(source, kept_weights, _without_positions(model_state))
    weights = {**model_state, **kept_weights}
    permuted: dict[str, Tensor] = {}
    for stack in stacks:
        permuted.update(_permute_queries_and_keys(stack.prefix, stack.module, stack.spec, weights))
        weights[f"{stack.prefix}{STATE_KEY}"] = _combine_identities(
            stack, source_weights
        ).to_tensor()
    descriptions = []
    for name in filter(_is_position, model_state):
        stack = next(pair for pair in stacks if name.startswith(pair.prefix))
        values, origin = _find_source_values(
            name, model_state[name], source_weights, source, stack, extend
        )
        weights[name] = model_state[name] if values is None else values
        descriptions.append(f"{name} {tuple(model_state[name].shape)}: {origin}")
    for name in source_weights:
        if _is_position(name) and name not in model_state:
            source_name = _name_in_source(name, source)
            shape = tuple(source.weights[source_name].shape)
            descriptions.append(f"{source_name} {shape}: dropped")
    weights.update(permuted)
    # Strict, so that fairseq checks names and shapes. It may change the dictionary.
    model.load_state_dict(dict(weights))
    kept = [name for name in kept_weights if name not in permuted]
    return StartWeights(weights, kept, list(permuted), descriptions, heads)


def _pair_stacks(source: Pretrained, model: Any) -> list[StackPair]:
    """Pair the stacks of the new model with the positions of the source."""
    names = {id(module): name for name, module in model.named_modules()}
    for_bos = getattr(model, "positions_for_bos", 0)
    pairs = []
    for side, stack in list_stacks(model):
        length = source.num_positions[side]
        lengths = (length, length + for_bos)
        pairs.append(StackPair(f"{names[id(stack)]}.", stack, source.specs[side], lengths))
    return pairs


def _is_position(name: str) -> bool:
    return is_position_parameter(name) or name.endswith(STOCK_SINUSOIDS)


def _without_positions(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the parameters that have nothing to do with positions."""
    return {
        name: weight
        for name, weight in weights.items()
        if not (_is_position(name) or is_identity(name))
    }


def _combine_identities(stack: StackPair, source_weights: Mapping[str, Tensor]) -> Identity:
    """Combine the settings of the source's weights with the positions of the new model.

    If an encoding is kept, so is the trained length, on which the scaling of a rotation may depend.
    """
    state = source_weights.get(f"{stack.prefix}{STATE_KEY}")
    old = None if state is None else Identity.from_tensor(state)
    new = stack.module.identity
    if old is not None:
        new = new._replace(weight_settings=old.weight_settings)
    old_names = {item.name for item in stack.spec.items}
    new_names = {item.name for item in stack.module.assembly.spec.items}
    if not (old_names & new_names) - {"none"}:
        return new
    length = stack.table_lengths[0] if old is None else old.trained_length
    return new._replace(trained_length=length)


def _refuse_other_parameters(
    source: Pretrained, source_weights: Mapping[str, Tensor], model_weights: Mapping[str, Tensor]
) -> None:
    """Refuse a source whose parameters other than positions are not those of the model."""
    both = source_weights.keys() & model_weights.keys()
    for names, difference in (
        (model_weights.keys() - both, "lacks"),
        (source_weights.keys() - both, "has, unlike the new model,"),
        (
            {n for n in both if source_weights[n].shape != model_weights[n].shape},
            "has other sizes in",
        ),
    ):
        if names:
            raise UserError(
                f"{source.path}: it {difference} {len(names)} parameters such as {min(names)}: the "
                "options in the checkpoint do not describe its weights"
            )


def _find_source_values(
    name: str,
    initial: Tensor,
    source_weights: Mapping[str, Tensor],
    source: Pretrained,
    stack: StackPair,
    extend: Optional[LengthRule],
) -> tuple[Optional[Tensor], str]:
    """Find the source's values for a position parameter, or None; also describe their origin.

    Args:
        name: name of the parameter in the new model.
        initial: its initial values there.
        source_weights: parameters of the source, by the new model's names.
        source: the trained model.
        stack: the stack of the parameter.
        extend: rule for a longer table; None refuses longer tables.

    Raises:
        UserError: a table would be longer, and ``extend`` is None.
    """
    if name not in source_weights:
        return None, "new"
    # Of `encoder.layers.0.self_attn.encodings.shaw.table.weight` it is `shaw`.
    encoding = name.rpartition(KEY_MARK)[2].split(".")[0]
    if changed := list_changed_options(encoding, stack.spec, stack.module.assembly.spec):
        return None, f"new, as the source has other options: {changed}"
    old = source_weights[name]
    mapped = f"mapped from {_name_in_source(name, source)}"
    if mapped.endswith(STOCK_TABLE):
        mapped += f"[{STOCK_OFFSET}:]"
    if old.shape == initial.shape:
        return old, mapped
    module, path = _find_encoding(name, stack)
    longer = extend_parameter(module, path, old, stack.table_lengths, extend)
    if longer is None:
        return None, f"new, as the source's is {tuple(old.shape)}"
    if longer.shape != initial.shape:
        rules = "; ".join(f"--extend {rule} {effect}" for rule, effect in LENGTH_RULES.items())
        raise UserError(
            f"{name} has {old.size(0)} rows in the source and would have {initial.size(0)}: say "
            f"how a longer table is made ({rules}), or leave --max-positions out"
        )
    if module.extend(path, old).shape == initial.shape:
        return longer, f"{mapped}, {tuple(old.shape)}: extended to longer distances"
    if old.size(0) > initial.size(0):  # a view of the source's table, which would be stored whole
        return longer.clone(), f"{mapped}, the first of {old.size(0)} rows"
    assert extend is not None  # else the table is still too short
    return longer, f"{mapped}, {old.size(0)} rows: --extend {extend} {LENGTH_RULES[extend]}"


def _find_encoding(name: str, stack: StackPair) -> tuple[Encoding, str]:
    """Find the encoding of a parameter, and the parameter's name in it."""
    path = name.removeprefix(stack.prefix)
    return next(
        (module, path.removeprefix(f"{module_path}."))
        for module_path, module in stack.module.named_modules()
        if isinstance(module, Encoding) and path.startswith(f"{module_path}.")
    )


def _name_in_source(name: str, source: Pretrained) -> str:
    """Look up the name of a position parameter in the source's file, perhaps one of fairseq."""
    stock = name.replace(LEARNED_TABLE, STOCK_TABLE)
    # fairseq's first RoBERTas called their encoder decoder; one of these names is in the file.
    oldest = [f"decoder.{newer.partition('.')[2]}" for newer in (name, stock)]
    return next(candidate for candidate in (name, stock, *oldest) if candidate in source.weights)


def _permute_queries_and_keys(
    prefix: str, stack: Any, old: Spec, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Reorder the weights of a stack's queries and keys for another layout of pairs.

    A layout says which coordinates of a head a rotation turns as a pair: with 4 coordinates,
    ``interleaved`` turns (0, 1) and (2, 3), ``half`` turns (0, 2) and (1, 3). A score is a sum over
    coordinates, so it does not change if queries and keys are reordered in the same way.

    Args:
        prefix: beginning of the names of the stack's parameters.
        stack: the stack, with the new positions.
        old: the positions that the weights were trained with.
        weights: all weights by name.

    Returns:
        The reordered weights by name; empty if the layout stays.

    Raises:
        UserError: another encoding of the stack multiplies vectors with queries or keys.
    """
    dims, spec = stack.assembly.dims, stack.assembly.spec
    attentions = ["self_attn"]
    if getattr(stack, "rotates_source", False):
        attentions.append("encoder_attn")
    permuted = {}
    for layer in range(len(stack.layers)):
        old_rotary = _build_rotary(old, layer, dims)
        new_rotary = _build_rotary(spec, layer, dims)
        if old_rotary is None or new_rotary is None or old_rotary.rotated != new_rotary.rotated:
            continue
        if old_rotary.layout == new_rotary.layout:
            continue
        if not all(terms.is_biased_dot_product for terms in stack.assembly.draft_terms("auto")):
            raise UserError(
                f"{spec}: the layout of pairs can change if other encodings add numbers to the "
                "scores, but not if they multiply vectors with queries or keys"
            )
        # order() lists the coordinates pair by pair; move each one to its new place.
        index = old_rotary.order()[new_rotary.order().argsort()]
        for names in product(attentions, ("q_proj", "k_proj"), ("weight", "bias")):
            name = ".".join([f"{prefix}layers.{layer}", *names])
            rows = weights[name].unflatten(0, (dims.num_heads, -1))[:, index]  # [H, D, ...]
            permuted[name] = rows.flatten(0, 1)
    return permuted


def with_default_layouts(spec: Spec) -> Spec:
    """Replace the layout of each rotation of a spec by the default."""

    def plain(layer: Items) -> Items:
        return tuple(
            Item.canonical(item.name, {key: x for key, x in item.options if key != "layout"})
            for item in layer
        )

    layers = tuple(map(plain, spec.layers))
    # Writes layers that have become equal once.
    return Spec(plain(spec.whole_stack), layers).select_layers(range(len(layers)))


def _build_rotary(spec: Spec, layer: int, dims: Dims) -> Optional[Rope]:
    """Build the rotary encoding of a layer; None if it has none."""
    for item in spec.select_layers([layer]).items:
        if issubclass(item.encoding, Rope):
            (built,) = build_encodings({item.name: item}, dims).as_list()
            return cast(Rope, built)
    return None
