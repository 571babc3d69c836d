"""Keeps trained weights of positions when a model is given other positions, or names lost ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.position_parameters import (
    LENGTH_RULES,
    LengthRule,
    extend_parameter,
    list_changed_options,
)
from fairseq_posenc.specs import Spec


def copy_weights(
    part: nn.Module,
    trained: dict[str, Tensor],
    old_spec: Spec | None,
    new_spec: Spec,
    old_length: int,
    extend: LengthRule | None,
) -> list[str]:
    """Copy weights that keep their meaning to a part of the new positions of a stack.

    Args:
        part: the part, with new weights.
        trained: the present weights, by the names of the parameters of ``part``.
        old_spec: the present positions; None if no spec describes them.
        new_spec: the new positions.
        old_length: number of present positions.
        extend: how tables by position become longer; None leaves the rows beyond untrained.

    Returns:
        A note for the user about each weight that is not copied, or only in part.
    """
    notes = []
    for place, encoding in part.named_modules():
        if not isinstance(encoding, Encoding):
            continue
        for name, parameter in encoding.named_parameters():
            weight = trained.get(f"{place}.{name}")
            if weight is None or weight.is_meta:  # new, or without values: they are loaded later
                continue
            changed = old_spec and list_changed_options(encoding.name, old_spec, new_spec)
            if changed:
                notes.append(
                    f"{place}.{name}: untrained, as the model's has other options: {changed}"
                )
                continue
            fitted = extend_parameter(encoding, name, weight, [old_length], extend)
            if fitted is None:
                notes.append(f"{place}.{name}: untrained, as the model's is {tuple(weight.shape)}")
                continue
            is_whole = fitted.shape == parameter.shape  # else it has fewer rows
            with torch.no_grad():
                (parameter if is_whole else parameter[: len(fitted)]).copy_(fitted)
            if not is_whole:
                fresh = len(parameter) - len(fitted)
                rules = "; ".join(f"extend={rule!r} {does}" for rule, does in LENGTH_RULES.items())
                notes.append(
                    f"{place}.{name}: {fresh} of {len(parameter)} rows are new and untrained "
                    f"({rules})"
                )
    return notes


def list_lost_weights(stack: Stack, parts: Iterable[tuple[nn.Module, nn.Module]]) -> list[str]:
    """Say which trained weights are taken away, and which are new beside earlier positions.

    Args:
        stack: the stack, with its present positions.
        parts: the modules of the stack that get new positions, each with these.
    """
    lost: set[str] = set()
    new: set[str] = set()
    for owner, part in parts:
        trained, names = stack.read_weights(owner), dict(part.named_parameters())
        lost |= {name for name, x in trained.items() if name not in names and not x.is_meta}
        new |= names.keys() - trained.keys()
    if not hasattr(stack.module, POSITIONS):  # in a stock model, all others are new
        new.clear()
    messages = {
        "trained weights are taken away, load the model again to have them back: ": lost,
        "weights are untrained, as the positions until now lack them: ": new,
    }
    return [text + ", ".join(sorted(names)) for text, names in messages.items() if names]
