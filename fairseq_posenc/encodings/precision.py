"""Scores that an encoding computes itself, in float32 at least whatever the model is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full(x: Tensor) -> Tensor:
    """Return numbers in float32 at least: products of them overflow fp16."""
    return x if x.dtype == torch.float64 else x.float()


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not round such products again."""
    if device.type == "meta":  # which has no autocast, and computes nothing
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
