"""Copies trained weights of positions whose meaning stays when a model is given other positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import AttentionPositions
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import count_positions, read_positions
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.hf.stack_forward import HFStackPositions
from fairseq_posenc.position_parameters import (
    LENGTH_RULES,
    LengthRule,
    extend_parameter,
    list_changed_options,
)
from fairseq_posenc.specs import Spec, parse


class PreviousPositions(NamedTuple):
    """The positions that a model had before; None if this package cannot describe them."""

    spec: Spec | None
    length: int | None  # the number of positions

    @classmethod
    def read(cls, model: PreTrainedModel, stack: Stack) -> PreviousPositions:
        """Read the current positions of a stack of a model, before they are replaced."""
        positions = getattr(stack.module, POSITIONS, None)
        if positions is not None:
            return cls(positions.assembly.spec, count_positions(model))
        try:
            return cls(parse(read_positions(model)), count_positions(model))
        except UserError:
            return cls(None, None)


def copy_weights(
    part: HFStackPositions | AttentionPositions,
    trained: dict[str, Tensor],
    spec: Spec,
    before: PreviousPositions,
    extend: LengthRule | None,
) -> list[str]:
    """Copy weights to a part of the new positions of a stack.

    Args:
        part: the part, with new weights.
        trained: the present weights, by the names of the parameters of ``part``.
        spec: the new positions.
        before: the present positions.
        extend: how tables by position become longer; None leaves the rows beyond untrained.

    Returns:
        A note for the user about each weight that is not copied, or only in part.
    """
    notes = []
    lengths = () if before.length is None else (before.length,)
    for place, encoding in part.named_modules():
        if not isinstance(encoding, Encoding):
            continue
        for name, parameter in encoding.named_parameters():
            weight = trained.get(f"{place}.{name}")
            if weight is None or weight.is_meta:  # new, or about to be loaded
                continue
            changed = before.spec and list_changed_options(encoding.name, before.spec, spec)
            if changed:
                notes.append(
                    f"{place}.{name}: untrained, as the model's has other options: {changed}"
                )
                continue
            fitted = extend_parameter(encoding, name, weight, lengths, extend)
            if fitted is None:
                notes.append(f"{place}.{name}: untrained, as the model's is {tuple(weight.shape)}")
                continue
            is_whole = fitted.shape == parameter.shape
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
