"""The precision of scores: at least float32, even in models of lower precision.

Sums of forget gates and of randomly drawn positions need more: they are integers in units of 2^-32
(fixed point), handed on as two float32 numbers to add up.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

_FIXED_BITS = 32


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast to float32, unless the type is float64: scores may be too large for float16."""
    return x if x.dtype == torch.float64 else x.float()


def make_constant(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Make a tensor ``(n,)`` of numbers, whatever torch's default type and device are.

    It is made on the CPU and copied without waiting for the device.
    """
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def to_fixed(x: Tensor) -> Tensor:
    """Round float32 numbers to int64, in units of 2^-32, so that their sums are exact."""
    # The limit keeps sums of 21,000 numbers within int64, and changes no weight: a softmax gives
    # weight 0 to a score that is lower by 1e5.
    return (x.clamp(-1e5, 1e5) * 2.0**_FIXED_BITS).round().long()


def split_fixed(fixed: Tensor) -> Tensor:
    """Split the numbers of :func:`to_fixed` into two float32 parts, ``(..., 2)``, to add up.

    Subtract part by part and then add up: the large first parts cancel exactly, without float64,
    which some devices lack. The parts are exact below 2^16; above, their relative error is 2^-48.
    """
    coarse = fixed.float()
    parts = torch.stack([coarse, (fixed - coarse.long()).float()], -1)
    return parts * 2.0**-_FIXED_BITS


def sum_exactly(x: Tensor, before: Tensor | None) -> Tensor:
    """Add up ``(batch, heads, T)`` over T tokens; sums have two parts, ``(batch, heads, T, 2)``.

    A score contains the difference of two large sums. Float32 would round them, and decoding would
    differ from a full pass. So float32 numbers are added up as integers, and split by
    :func:`split_fixed`; float64 is exact enough, and its second part is 0.

    Args:
        x: numbers, float32 or float64.
        before: the last sum of earlier tokens, ``(batch, heads, 1, 2)``; detached in float32.
    """
    sums = x.cumsum(-1)
    if x.dtype == torch.float64:
        sums = sums if before is None else before[..., 0] + sums
        return torch.stack([sums, torch.zeros_like(sums)], -1)
    fixed = to_fixed(x.detach()).cumsum(-1)
    if before is not None:  # both parts are whole numbers of units
        fixed = fixed + (before.detach() * 2.0**_FIXED_BITS).long().sum(-1)
    # The integers have no gradient: the first part gets that of the float32 sums, plus 0.
    return split_fixed(fixed) + F.pad((sums - sums.detach())[..., None], (0, 1))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Make a context in which autocast does not round products."""
    # torch's context only where it has an effect, since an exported graph would keep it. The device
    # "meta" has no autocast, and computes nothing.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
