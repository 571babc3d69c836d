"""Fits trained position parameters to a model whose encodings or lengths differ.

Loading a state dict first extends the tables that can be extended without loss
(:func:`extend_tables`), then replaces what still does not fit (:func:`fit_positions`). A model that
is given other positions keeps the parameters whose meaning stays, fitted to its length
(:func:`copy_parameters`).
"""

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.specs import Spec

logger = logging.getLogger(__name__)
LengthRule = Literal["copy", "interpolate"]
LENGTH_RULES: dict[str, str] = {
    "copy": "repeats the table from position 0 on",
    "interpolate": "stretches it, so that the positions between come from their neighbors",
}


def is_position_parameter(name: str) -> bool:
    """Check whether a state-dict key belongs to a position encoding."""
    return ".encodings." in name  # the name of the module of encodings, in every model


def extend_tables(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> list[str]:
    """Lengthen, to the model's length, tables that are indexed by distance (`Encoding.extend`).

    Every distance keeps its row, and parameters of other kinds stay as they are.

    Args:
        model: the model that will load ``state_dict``.
        state_dict: changed in place.
        prefix: text before the names of the model's parameters in ``state_dict``.

    Returns:
        A description of each extended table, for messages.
    """
    changes = []
    for name, module in model.named_modules(prefix=prefix.rstrip(".")):
        if not isinstance(module, Encoding):
            continue
        for parameter_name, parameter in module.named_parameters():
            key = f"{name}.{parameter_name}"
            old = state_dict.get(key)
            if old is None or old.dim() != parameter.dim():
                continue  # fit_positions replaces it, or loading reports it
            longer = module.extend(parameter_name, old)
            if longer.shape != old.shape:
                logger.info("%s: extended to longer distances", key)
                changes.append(_describe_resized(key, old, longer))
                state_dict[key] = longer
    return changes


def copy_parameters(
    new: nn.Module,
    trained: dict[str, Tensor],
    old_spec: Spec | None,
    new_spec: Spec,
    length: int,
    rule: LengthRule | None,
    was_causal: bool,
) -> list[str]:
    """Copy trained parameters to new encodings that have parameters of the same names.

    Args:
        new: the new encodings, which are changed.
        trained: the trained values, by the names that they have in ``new``.
        old_spec: the spec that they were trained with; None if no spec describes it.
        new_spec: the spec of the new encodings.
        length: number of positions that a trained table has, if it is one by position.
        rule: one of ``LENGTH_RULES``, if such a table must grow; None leaves new rows untrained.
        was_causal: whether the parameters were trained in a causal stack.

    Returns:
        A note about each trained parameter that is not copied, or only in part.
    """
    notes = []
    for name, encoding in new.named_modules():
        if not isinstance(encoding, Encoding):
            continue
        for parameter_name, _ in encoding.named_parameters():
            key = f"{name}.{parameter_name}"
            if key not in trained:
                continue
            if old_spec and (changed := _list_changes(encoding, old_spec, new_spec)):
                note = f"untrained, because of different options: {changed}"
            elif encoding.rows_depend_on_causal and was_causal != encoding.dims.causal:
                now = "now" if encoding.dims.causal else "no longer"
                note = f"untrained, as the model is {now} causal"
            else:
                note = _copy_parameter(encoding, parameter_name, trained[key], length, rule)
            if note:
                notes.append(f"{key}: {note}")
    return notes


def _list_changes(encoding: Encoding, old: Spec, new: Spec) -> str:
    """List an encoding's options that differ between two specs and change what its rows mean."""

    def find_options(spec: Spec) -> set[tuple[str, Any]]:
        items = [item for item in spec.items if item.name == encoding.name]
        return {option for item in items for option in item.options}  # names and values

    before, now = find_options(old), find_options(new)
    kept = (*encoding.length_options, "scale_factor")  # they change no row's meaning
    changed = [f"{name}={value} before" for name, value in before - now if name not in kept]
    changed += [f"{name}={value} now" for name, value in now - before if name not in kept]
    return ", ".join(sorted(changed))


@torch.no_grad()
def _copy_parameter(
    encoding: Encoding, name: str, trained: Tensor, length: int, rule: LengthRule | None
) -> str:
    """Copy a trained parameter to an encoding: see :func:`copy_parameters`.

    A table with a row per distance can only become longer. One with a row per position loses its
    last rows, or gets more: filled by a rule, else left as they were initialized. The result says
    what is untrained; it is empty if nothing is.
    """
    parameter = encoding.get_parameter(name)
    extended = encoding.extend(name, trained)
    if extended.shape == parameter.shape:
        parameter.copy_(extended)
        return ""
    misfit = f"untrained, as the trained one is {tuple(trained.shape)}"
    if not encoding.has_position_table or trained.shape[1:] != parameter.shape[1:]:
        return misfit
    axes = encoding.axes  # their tables, of equal length, follow one another in the rows
    # A table by position may begin with rows of no position, as row 0 of `tupe_shared`.
    offset = parameter.size(0) // axes - encoding.dims.max_positions
    if trained.size(0) != axes * (offset + length):
        return misfit
    old, new = (x.unflatten(0, (axes, -1)) for x in (trained, parameter))  # views, [axes, rows, C]
    rows = new.size(1)
    if rule is not None and old.size(1) < rows:
        old = _lengthen_tables(old, offset, rows, rule)
    kept = min(old.size(1), rows)
    new[:, :kept] = old[:, :kept]  # changes the parameter
    if lost := axes * (old.size(1) - kept):
        return f"{lost} of {trained.size(0)} rows cut off; load the model again to get them back"
    if kept == rows:
        return ""
    rules = "; ".join(f"extend={known!r} {does}" for known, does in LENGTH_RULES.items())
    return f"{axes * (rows - kept)} of {axes * rows} rows are new and untrained ({rules})"


def fit_positions(state_dict: dict[str, Tensor], ours: dict[str, Tensor]) -> list[str]:
    """Replace position parameters that do not fit a model by the model's.

    Args:
        state_dict: changed in place.
        ours: the model's state dict.

    Returns:
        A description of each parameter that was added, dropped or replaced.
    """
    ours = {key: x for key, x in ours.items() if is_position_parameter(key)}
    theirs = {key: x for key, x in state_dict.items() if is_position_parameter(key)}
    resized = [key for key in ours if key in theirs and theirs[key].shape != ours[key].shape]
    fresh = [key for key in ours if key not in theirs]
    dropped = [key for key in theirs if key not in ours]
    for key in dropped:
        del state_dict[key]
    state_dict.update({key: ours[key] for key in (*fresh, *resized)})
    return (
        [f"{key} {tuple(ours[key].shape)} is not in the checkpoint" for key in fresh]
        + [f"{key} {tuple(theirs[key].shape)} is not in the model" for key in dropped]
        + [_describe_resized(key, theirs[key], ours[key]) for key in resized]
    )


def _lengthen_tables(tables: Tensor, offset: int, rows: int, rule: LengthRule) -> Tensor:
    """Lengthen tables by position to ``(axes, rows, C)``; row ``offset`` is that of position 0."""
    by_position = tables[:, offset:]  # [axes, n, C]
    length = rows - offset
    if rule == "copy":
        index = torch.arange(length, device=tables.device) % by_position.size(1)
        longer = by_position[:, index]
    else:
        channels = by_position.float().transpose(1, 2)  # [axes, C, n]
        stretched = F.interpolate(channels, length, mode="linear", align_corners=True)
        longer = stretched.transpose(1, 2).to(tables.dtype)
    return torch.cat([tables[:, :offset], longer], 1)


def _describe_resized(key: str, theirs: Tensor, ours: Tensor) -> str:
    return f"{key} is {tuple(theirs.shape)} in the checkpoint, {tuple(ours.shape)} in the model"
