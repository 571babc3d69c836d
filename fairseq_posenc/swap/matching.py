"""Which of the source's parameters the start has, and where its position parameters are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Optional

from torch import Tensor

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Spec
from fairseq_posenc.running.families import stacks_of
from fairseq_posenc.running.pretrained import STOCK_TABLE, Pretrained
from fairseq_posenc.swap.extending import RULES, Rule, lengthened
from fairseq_posenc.swap.layouts import reordered
from fairseq_posenc.transformer.adapting import (
    OWN,
    STOCK_OFFSET,
    STOCK_SINUSOIDS,
    is_position_parameter,
)
from fairseq_posenc.transformer.identity import KEY, Identity, is_identity

_FREE = ("max_distance", "scale_factor")  # options that leave a parameter's meaning as it is
Fate = Literal["new", "mapped", "dropped"]


class Parameter(NamedTuple):
    """What became of a position parameter.

    Attributes:
        name: in the start, or in the source if it is dropped.
        shape: likewise.
        fate: new, mapped, or dropped.
        note: from what, or why; goes on after the fate.
    """

    name: str
    shape: tuple[int, ...]
    fate: Fate
    note: str


class Start(NamedTuple):
    """The start's parameters, and an account of them.

    Attributes:
        weights: all parameters by name.
        kept: names of the source's parameters beside positions, as they are there.
        permuted: names of those whose rows stand in another order.
        positions: one entry for each position parameter of the start and of the source.
        heads: names of the source's parameters that belong to no encoder; they are left out.
    """

    weights: dict[str, Tensor]
    kept: list[str]
    permuted: list[str]
    positions: list[Parameter]
    heads: list[str]


class Stack(NamedTuple):
    """A stack of the start, and what the source has in its place.

    Attributes:
        prefix: of the names of its parameters.
        module: the stack.
        spec: its positions in the source.
        positions: how many the source has.
    """

    prefix: str
    module: Any
    spec: Spec
    positions: tuple[int, ...]


def match(source: Pretrained, model: Any, extend: Optional[Rule]) -> Start:
    """Give a model the source's weights.

    Args:
        source: the trained model.
        model: the start, its parameters drawn; filled, so that it has what the start has.
        extend: rule for longer tables by position; None refuses them.

    Raises:
        UserError: the rest of the parameters is not the model's, or a table would be longer.
    """
    stacks = _stacks(source, model)
    theirs, heads = _as_now(source, model)
    own = dict(model.state_dict())
    kept = [name for name in theirs if not _is_apart(name)]
    shared = {name: value for name, value in own.items() if not _is_apart(name)}
    _refuse_other_parameters(source, {name: theirs[name] for name in kept}, shared)
    weights = {**own, **{name: theirs[name] for name in kept}}
    permuted = {}
    for stack in stacks:
        permuted.update(reordered(stack.prefix, stack.module, stack.spec, weights))
        if state := _identity(stack, theirs):
            weights[f"{stack.prefix}{KEY}"] = state.encoded()
    accounts = []
    for name in filter(_is_position, own):
        stack = next(each for each in stacks if name.startswith(each.prefix))
        found, note = _find(name, own[name], theirs, source, stack, extend)
        weights[name] = own[name] if found is None else found
        fate: Fate = "new" if found is None else "mapped"
        accounts.append(Parameter(name, tuple(own[name].shape), fate, note))
    accounts += [
        _dropped(name, source) for name in theirs if _is_position(name) and name not in own
    ]
    weights.update(permuted)
    model.load_state_dict(dict(weights))  # strict: fairseq's own check of names and shapes
    still = [name for name in kept if name not in permuted]
    return Start(weights, still, list(permuted), accounts, heads)


def _stacks(source: Pretrained, model: Any) -> list[Stack]:
    names = {id(module): name for name, module in model.named_modules()}
    more = getattr(model, "positions_for_bos", 0)  # its tables may have room for <s> already
    return [
        Stack(
            f"{names[id(stack)]}.",
            stack,
            source.specs[side],
            (source.positions[side], source.positions[side] + more),
        )
        for side, stack in stacks_of(model)
    ]


def _as_now(source: Pretrained, model: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the source's weights under the names of today's fairseq, and what has no stack."""
    heads = [n for n in source.weights if not n.startswith(("encoder.", "decoder."))]
    weights = {name: value for name, value in source.weights.items() if name not in heads}
    upgrade: Any = model.upgrade_state_dict
    upgrade(weights)
    return weights, heads


def _is_position(name: str) -> bool:
    return is_position_parameter(name) or name.endswith(STOCK_SINUSOIDS)


def _is_apart(name: str) -> bool:
    return _is_position(name) or is_identity(name)


def _identity(stack: Stack, theirs: Mapping[str, Tensor]) -> Optional[Identity]:
    """Return what the start says of a stack whose encodings the source had: the trained length.

    What depends on it, such as a scaling's ramp, is to be for the length that was trained.
    """
    said = theirs.get(f"{stack.prefix}{KEY}")
    now = stack.module.identity
    both = {item.name for item in stack.spec.items} & {
        item.name for item in stack.module.assembly.spec.items
    }
    if not both - {"none"}:
        return None
    old = stack.positions[0] if said is None else Identity.decoded(said).trained_length
    return now._replace(trained_length=old)


def _refuse_other_parameters(
    source: Pretrained, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    both = theirs.keys() & own.keys()
    for names, what in (
        (own.keys() - both, "lacks"),
        (theirs.keys() - both, "holds, unlike the start,"),
        ({name for name in both if theirs[name].shape != own[name].shape}, "has other sizes in"),
    ):
        if names:
            raise UserError(
                f"{source.path}: it {what} {len(names)} parameters such as {min(names)}: "
                "its options do not tell how it was built"
            )


def _find(
    name: str,
    drawn: Tensor,
    theirs: Mapping[str, Tensor],
    source: Pretrained,
    stack: Stack,
    extend: Optional[Rule],
) -> tuple[Optional[Tensor], str]:
    """Return the source's values for a position parameter, None if it has none; and the note."""
    if name not in theirs:
        return None, ""
    if changed := _changed_options(name, stack.spec, stack.module.assembly.spec):
        return None, f", as the source has other options: {changed}"
    old, origin = theirs[name], _original(name, source)
    if origin.endswith(STOCK_TABLE):
        origin += f"[{STOCK_OFFSET}:]"
    if old.shape == drawn.shape:
        return old, f" from {origin}"
    longer = _extended(name, old, stack)
    if longer.shape == drawn.shape:
        return longer.clone(), f" from {origin}, {old.size(1)} rows: its ends are repeated"
    # Rows that belong to no position stand before the others.
    before = drawn.size(0) - stack.module.assembly.dims.max_positions
    if old.size(0) - before not in stack.positions or old.shape[1:] != drawn.shape[1:]:
        return None, f", as the source's is {tuple(old.shape)}"
    if extend is None:
        raise UserError(_ask_for_rule(name, old, drawn))
    longer = lengthened(old, before, drawn.size(0), extend)
    return longer, f" from {origin}, {old.size(0)} rows: --extend {extend} {RULES[extend]}"


def _extended(name: str, old: Tensor, stack: Stack) -> Tensor:
    """Return a table by distance with its ends repeated; any other parameter as it is."""
    before, _, after = f".{name.removeprefix(stack.prefix)}".rpartition(OWN)
    encoding, _, parameter = after.partition(".")
    module = stack.module.get_submodule(f"{before}{OWN}{encoding}"[1:])
    return module.extended(parameter, old) if isinstance(module, Encoding) else old


def _changed_options(name: str, old: Spec, new: Spec) -> str:
    """Return the options of a parameter's encoding that the source has otherwise."""
    encoding = name.rpartition(OWN)[2].split(".")[0]
    before, now = (
        {
            option
            for item in spec.items
            if item.name == encoding
            for option in item.options
            if option[0] not in _FREE and option[1] is not False
        }
        for spec in (old, new)
    )
    return ", ".join(sorted({f"{key}={value}" for key, value in before ^ now}))


def _ask_for_rule(name: str, old: Tensor, drawn: Tensor) -> str:
    rules = "; ".join(f"--extend {rule} {what}" for rule, what in RULES.items())
    return (
        f"{name} has {old.size(0)} rows in the source and would have {drawn.size(0)}: say how a "
        f"longer table is made ({rules}), or leave --max-positions out"
    )


def _dropped(name: str, source: Pretrained) -> Parameter:
    original = _original(name, source)
    return Parameter(original, tuple(source.weights[original].shape), "dropped", "")


def _original(name: str, source: Pretrained) -> str:
    """Return a position parameter's name in the source's file, which fairseq may have written."""
    stock = name.replace(".encodings.learned.table.weight", ".weight")
    oldest = [f"decoder.{each.partition('.')[2]}" for each in (name, stock)]
    return next(each for each in (name, stock, *oldest) if each in source.weights)
