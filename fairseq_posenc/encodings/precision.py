"""The precision of scores: float32 at least, whatever the model is in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast to float32, unless it is float64: products of scores overflow fp16."""
    return x if x.dtype == torch.float64 else x.float()


def make_constant(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Make a tensor ``(n,)`` of numbers, whatever torch's default type and device.

    It is made on the CPU and copied without waiting for the device.
    """
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast from rounding products again, as a context."""
    if device.type == "meta":  # has no autocast, and computes nothing
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
