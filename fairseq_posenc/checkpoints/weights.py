"""Checks a checkpoint's weights before they are loaded into a model."""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import STATE_KEY

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_broken_weights(state_dict: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Refuse broken weights, which torch would silently copy into the model.

    Only floating-point parameters are checked, and no identity: its tensor is an encoded text.
    """
    for name, parameter in model_state.items():
        if name not in state_dict or not parameter.is_floating_point() or name.endswith(STATE_KEY):
            continue
        if wrong := _describe_wrong_numbers(state_dict[name]):
            raise UserError(
                f"the checkpoint is damaged, or of a training that diverged: {name} {wrong}"
            )


def refuse_untied(state_dict: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Refuse two different matrices for a shared one: torch would keep the second of them."""
    first_names: dict[int, str] = {}  # by the address of the model's storage
    for name, parameter in model_state.items():
        address = _storage_address(parameter)
        weight = state_dict.get(name)
        if weight is None or _storage_address(weight) == address:
            continue  # not in the checkpoint, or the model's own, which replaced it
        first_name = first_names.setdefault(address, name)
        first = state_dict[first_name]
        if _storage_address(weight) != _storage_address(first) and not torch.equal(weight, first):
            raise UserError(
                f"the checkpoint's {name} is not its {first_name}, and this model shares them: "
                "build it as it was trained (--no-share-decoder-input-output-embed for a causal "
                "LM, --untie-weights-roberta for a masked one, no --share-... for translation)"
            )


def _storage_address(x: Tensor) -> int:
    """Get the address of a tensor's storage, which is the same for tensors that share it."""
    return x.untyped_storage().data_ptr()


def _describe_wrong_numbers(weight: Any) -> str | None:
    """Describe why the numbers of a tensor cannot be a weight's; None if they can."""
    if not isinstance(weight, Tensor):
        return f"is not a tensor, but of the type {type(weight).__name__}"
    if weight.dtype not in _FLOATS:
        name = str(weight.dtype).removeprefix("torch.")
        return f"holds numbers of the type {name}, not floating-point ones"
    # A sum needs no memory for a mask; only if it is not finite, the elements are counted.
    if weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32)).isfinite():
        return None
    if not (broken := int((~weight.isfinite()).sum())):
        return None  # finite numbers, of which only the sum overflows
    return f"has {broken:,} of {weight.numel():,} numbers that are NaN or infinite"
