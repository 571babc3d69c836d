"""Weights that no training leaves, and two matrices for a model that has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError


def refuse_broken_weights(state_dict: dict[str, Any], own: dict[str, Tensor]) -> None:
    """Refuse what torch would copy into the model without a word.

    Args:
        state_dict: of a checkpoint.
        own: the model's; only what it has, and has as floating-point numbers, is looked at.

    Raises:
        UserError: names the first such tensor.
    """
    for name in own:
        if name in state_dict and own[name].is_floating_point():
            wrong = _wrong(state_dict[name])
            if wrong:
                raise UserError(
                    f"the checkpoint is damaged, or of a training that diverged: {name} {wrong}"
                )


def refuse_untied(state_dict: dict[str, Any], own: dict[str, Tensor]) -> None:
    """Refuse two different matrices for one that the model shares: the second would win.

    Args:
        state_dict: of a checkpoint.
        own: the model's.

    Raises:
        UserError: names the first such pair.
    """
    first: dict[int, str] = {}
    for name in own:
        if name not in state_dict or place(state_dict[name]) == place(own[name]):
            continue  # the model's own, which starts fresh
        other = first.setdefault(place(own[name]), name)
        pair = state_dict[other], state_dict[name]
        if place(pair[0]) != place(pair[1]) and not torch.equal(*pair):
            raise UserError(
                f"the checkpoint's {name} is not its {other}, and this model shares them: build it "
                "as it was trained (--no-share-decoder-input-output-embed for a causal LM, "
                "--untie-weights-roberta for a masked one, no --share-... for translation)"
            )


def place(x: Tensor) -> int:
    """Return where the storage of a tensor begins: the same for tensors that share it."""
    return x.untyped_storage().data_ptr()


def _wrong(weight: Any) -> str | None:
    """Return what is wrong with a tensor, None if nothing is."""
    if not isinstance(weight, Tensor):
        return f"is no tensor, but of the type {type(weight).__name__}"
    if not weight.is_floating_point():
        kind = str(weight.dtype).removeprefix("torch.")
        return f"holds numbers of the type {kind}, not floating-point ones"
    if weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
        return f"says that it has {weight.numel():,} numbers, which are not in the file"
    # A sum reads the tensor once and keeps nothing. Only if it overflows are all parts looked at.
    if weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32)).isfinite():
        return None
    broken = int((~weight.isfinite()).sum())
    return (
        f"has {broken:,} of {weight.numel():,} numbers that are NaN or infinite" if broken else None
    )
