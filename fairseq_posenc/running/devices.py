"""What there is to compute on."""

from __future__ import annotations

import os
from typing import Optional

from fairseq_posenc.errors import UserError


def choose_device(device: Optional[str] = None, fp16: bool = False) -> str:
    """Return the device to compute on.

    Args:
        device: what the user asked for; None for a GPU if there is one.
        fp16: whether in half precision.

    Raises:
        UserError: there is no such device, or half precision was asked for without a GPU.
    """
    import torch  # the number of cores is asked for by programs that do without

    available = torch.cuda.is_available()
    device = device or ("cuda" if available else "cpu")
    if device.startswith("cuda") and not available:
        raise UserError(f"--device {device}: torch finds no GPU here; use --device cpu")
    if fp16 and device == "cpu":
        raise UserError("--fp16 is for GPUs; leave it out, or use --device cuda")
    return device


def cores() -> int:
    """Return how many processor cores this process may use, which may be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
