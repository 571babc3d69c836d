"""Finds the source's values for position parameters of the new model, and lengthens tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.checkpoints.state_dict_adapter import STOCK_OFFSET, STOCK_TABLE
from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.position_parameters import ENCODINGS
from fairseq_posenc.specs import Spec
from fairseq_posenc.workbench.loading.pretrained import Pretrained

LengthRule = Literal["copy", "interpolate"]  # values of --extend
RULES: dict[str, str] = {
    "copy": "repeats the table from its first row",
    "interpolate": "stretches it, so that the positions between come from their neighbours",
}
# Options that do not change the meaning of a parameter.
_FREE_OPTIONS = ("max_distance", "scale_factor")


def lengthen_table(table: Tensor, before: int, rows: int, rule: LengthRule) -> Tensor:
    """Lengthen a table by position.

    Args:
        table: the table, ``(n, C)``.
        before: number of its first rows that belong to no position, and are kept.
        rows: number of rows of the result, ``(rows, C)``.
        rule: how to lengthen it; see ``RULES``.
    """
    numbered, wanted = table[before:], rows - before
    if rule == "copy":
        longer = numbered[torch.arange(wanted) % numbered.size(0)]
    else:
        stretched = F.interpolate(
            numbered.float().t()[None], size=wanted, mode="linear", align_corners=True
        )  # [1, C, wanted]
        longer = stretched[0].t().to(numbered.dtype)
    return torch.cat([table[:before], longer])


class StackPair(NamedTuple):
    """A stack of the new model, and the positions of the same stack in the source."""

    prefix: str  # beginning of the names of its parameters
    module: Any  # the new stack
    spec: Spec  # position encodings of the source
    positions: tuple[int, ...]  # numbers of positions that tables of the source may have


def find_source_values(
    name: str,
    drawn: Tensor,
    source_weights: Mapping[str, Tensor],
    source: Pretrained,
    stack: StackPair,
    extend: Optional[LengthRule],
) -> tuple[Optional[Tensor], str]:
    """Find the source's values for a position parameter, or None; and a note for the user.

    Args:
        name: name of the parameter in the new model.
        drawn: its initial values there.
        source_weights: parameters of the source, by the new model's names.
        source: the trained model.
        stack: the stack of the parameter.
        extend: rule for a longer table; None refuses longer tables.

    Raises:
        UserError: a table would be longer, and there is no rule.
    """
    if name not in source_weights:
        return None, ""
    if changed := _changed_options(name, stack.spec, stack.module.assembly.spec):
        return None, f", as the source has other options: {changed}"
    old, origin = source_weights[name], name_in_source(name, source)
    if origin.endswith(STOCK_TABLE):
        origin += f"[{STOCK_OFFSET}:]"
    if old.shape == drawn.shape:
        return old, f" from {origin}"
    longer = _repeat_ends(name, old, stack)
    if longer.shape == drawn.shape:
        return longer.clone(), f" from {origin}, {old.size(1)} rows: its ends are repeated"
    # The first rows may belong to no position.
    before = drawn.size(0) - stack.module.assembly.dims.max_positions
    if old.size(0) - before not in stack.positions or old.shape[1:] != drawn.shape[1:]:
        return None, f", as the source's is {tuple(old.shape)}"
    if extend is None:
        rules = "; ".join(f"--extend {rule} {effect}" for rule, effect in RULES.items())
        raise UserError(
            f"{name} has {old.size(0)} rows in the source and would have {drawn.size(0)}: say how "
            f"a longer table is made ({rules}), or leave --max-positions out"
        )
    longer = lengthen_table(old, before, drawn.size(0), extend)
    return longer, f" from {origin}, {old.size(0)} rows: --extend {extend} {RULES[extend]}"


def _repeat_ends(name: str, old: Tensor, stack: StackPair) -> Tensor:
    """Lengthen a table by distance by repeating its ends; return any other parameter as it is."""
    before, _, after = f".{name.removeprefix(stack.prefix)}".rpartition(ENCODINGS)
    encoding, _, parameter = after.partition(".")
    module = stack.module.get_submodule(f"{before}{ENCODINGS}{encoding}"[1:])
    return module.extend(parameter, old) if isinstance(module, Encoding) else old


def _changed_options(name: str, old: Spec, new: Spec) -> str:
    """List the options of a parameter's encoding that differ between source and new model."""
    encoding = name.rpartition(ENCODINGS)[2].split(".")[0]
    old_options, new_options = (
        {
            (key, value)
            for item in spec.items
            for key, value in item.options
            if item.name == encoding and key not in _FREE_OPTIONS and value is not False
        }
        for spec in (old, new)
    )
    return ", ".join(sorted({f"{key}={value}" for key, value in old_options ^ new_options}))


def name_in_source(name: str, source: Pretrained) -> str:
    """Look up the name of a position parameter in the source's file, perhaps one of fairseq."""
    stock = name.replace(".encodings.learned.table.weight", ".weight")
    oldest = [f"decoder.{candidate.partition('.')[2]}" for candidate in (name, stock)]
    return next(candidate for candidate in (name, stock, *oldest) if candidate in source.weights)
