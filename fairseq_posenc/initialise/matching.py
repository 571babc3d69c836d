"""Which of the source's parameters the start has, and where its position parameters are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.registry import Spec
from fairseq_posenc.running.pretrained import STOCK_TABLE, Pretrained
from fairseq_posenc.transformer.adapting import (
    STOCK_OFFSET,
    STOCK_SINUSOIDS,
    is_position_parameter,
)
from fairseq_posenc.transformer.identity import is_identity

Rule = Literal["copy", "interpolate"]
RULES: dict[str, str] = {
    "copy": "repeats the table from its first row",
    "interpolate": "stretches it, so that the positions between come from their neighbours",
}
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
        positions: one entry for each position parameter of the start and of the source.
        heads: names of the source's parameters that belong to no encoder; they are left out.
    """

    weights: dict[str, Tensor]
    kept: list[str]
    positions: list[Parameter]
    heads: list[str]


def match(source: Pretrained, model: PositionalRoberta, extend: Optional[Rule]) -> Start:
    """Give a model the source's weights.

    Args:
        source: the trained model.
        model: the start, its parameters drawn; filled, so that it has what the start has.
        extend: rule for longer tables by position; None refuses them.

    Raises:
        UserError: the rest of the parameters is not the model's, or a table would be longer.
    """
    theirs = _as_now(source, model)
    own = dict(model.state_dict())
    heads = [name for name in theirs if not name.startswith("encoder.")]
    apart = (*filter(_is_position, theirs), *filter(is_identity, theirs), *heads)
    kept = [name for name in theirs if name not in apart]
    shared = {k: v for k, v in own.items() if not _is_position(k) and not is_identity(k)}
    _refuse_other_parameters(source, {name: theirs[name] for name in kept}, shared)
    weights = {**own, **{name: theirs[name] for name in kept}}
    accounts = []
    for name in filter(_is_position, own):
        found, note = _find(name, own[name], theirs, source, model, extend)
        weights[name] = own[name] if found is None else found
        fate: Fate = "new" if found is None else "mapped"
        accounts.append(Parameter(name, tuple(own[name].shape), fate, note))
    accounts += [
        _dropped(name, source) for name in theirs if _is_position(name) and name not in own
    ]
    model.load_state_dict(dict(weights))  # strict: fairseq's own check of names and shapes
    return Start(weights, kept, accounts, heads)


def _as_now(source: Pretrained, model: PositionalRoberta) -> dict[str, Tensor]:
    """Return the source's weights under the names of today's fairseq."""
    heads = {n: v for n, v in source.weights.items() if not n.startswith(("encoder.", "decoder."))}
    weights = {n: v for n, v in source.weights.items() if n not in heads}
    upgrade: Any = model.upgrade_state_dict
    upgrade(weights)
    return {**weights, **heads}


def _is_position(name: str) -> bool:
    return is_position_parameter(name) or name.endswith(STOCK_SINUSOIDS)


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
                f"--from {source.path}: it {what} {len(names)} parameters such as {min(names)}: "
                "its options do not tell how it was built"
            )


def _find(
    name: str,
    drawn: Tensor,
    theirs: Mapping[str, Tensor],
    source: Pretrained,
    model: PositionalRoberta,
    extend: Optional[Rule],
) -> tuple[Optional[Tensor], str]:
    """Return the source's values for a position parameter, None if it has none; and the note."""
    if name not in theirs:
        return None, ""
    encoder: Any = model.encoder
    stack = encoder.sentence_encoder
    if changed := _changed_options(name, source.spec, stack.assembly.spec):
        return None, f", as the source has other options: {changed}"
    old, origin = theirs[name], _original(name, source)
    if origin.endswith(STOCK_TABLE):
        origin += f"[{STOCK_OFFSET}:]"
    if old.shape == drawn.shape:
        return old, f" from {origin}"
    longer = _extended(name, old, model)
    if longer.shape == drawn.shape:
        return longer.clone(), f" from {origin}, {old.size(1)} rows: its ends are repeated"
    before = drawn.size(0) - stack.max_source_positions  # rows that belong to no position
    if old.size(0) != before + source.max_positions or old.shape[1:] != drawn.shape[1:]:
        return None, f", as the source's is {tuple(old.shape)}"
    if extend is None:
        raise UserError(_ask_for_rule(name, old, drawn))
    longer = torch.cat([old[:before], _longer(old[before:], drawn.size(0) - before, extend)])
    return longer, f" from {origin}, {old.size(0)} rows: --extend {extend} {RULES[extend]}"


def _extended(name: str, old: Tensor, model: PositionalRoberta) -> Tensor:
    """Return a table by distance with its ends repeated; any other parameter as it is."""
    before, _, after = name.partition(".encodings.")
    encoding, _, parameter = after.partition(".")
    module = model.get_submodule(f"{before}.encodings.{encoding}")
    return module.extended(parameter, old) if isinstance(module, Encoding) else old


def _changed_options(name: str, old: Spec, new: Spec) -> str:
    """Return the options of a parameter's encoding that the source has otherwise."""
    encoding = name.rpartition(".encodings.")[2].split(".")[0]
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


def _longer(table: Tensor, rows: int, rule: Rule) -> Tensor:
    """Return ``(rows, C)`` of ``(n, C)``, by a rule."""
    if rule == "copy":
        return table[torch.arange(rows) % table.size(0)]
    stretched = F.interpolate(
        table.float().t()[None], size=rows, mode="linear", align_corners=True
    )  # [1, C, rows]
    return stretched[0].t().to(table.dtype).contiguous()


def _dropped(name: str, source: Pretrained) -> Parameter:
    original = _original(name, source)
    return Parameter(original, tuple(source.weights[original].shape), "dropped", "")


def _original(name: str, source: Pretrained) -> str:
    """Return a position parameter's name in the source's file, which fairseq may have written."""
    stock = name.replace(".encodings.learned.table.weight", ".weight")
    oldest = [f"decoder.{each.partition('.')[2]}" for each in (name, stock)]
    return next(each for each in (name, stock, *oldest) if each in source.weights)
