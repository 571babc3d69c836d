"""Chooses the device and the precision to compute in, and counts cores and GPUs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fairseq_posenc.errors import UserError

if TYPE_CHECKING:
    import torch


def choose_device(device: str | None = None, fp16: bool = False) -> str:
    """Choose the device that was requested, else a GPU if there is one, else the processor.

    Raises:
        UserError: torch finds no GPU, or half precision was requested on the processor.
    """
    import torch  # slow to import, and not needed to count cores

    available = torch.cuda.is_available()
    device = device or ("cuda" if available else "cpu")
    if device == "cuda" and not available:
        raise UserError(f"--device {device}: torch finds no GPU here; use --device cpu")
    if fp16 and device == "cpu":
        raise UserError("--fp16 is for GPUs; leave it out, or use --device cuda")
    return device


class ComputeOptions(NamedTuple):
    """Device and precision of a model."""

    device: str  # `cpu` or `cuda`
    dtype: torch.dtype  # of its parameters

    @classmethod
    def choose(cls, device: str | None, fp16: bool, bf16: bool) -> ComputeOptions:
        """Choose from ``--device``, ``--fp16`` and ``--bf16``; float32 without either.

        Raises:
            UserError: see :func:`choose_device`.
        """
        import torch

        dtype = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
        return cls(choose_device(device, fp16), dtype)

    def place(self, model: Any) -> Any:
        """Move a model to the device, in evaluation mode."""
        return model.to(device=self.device, dtype=self.dtype).eval()


def cores() -> int:
    """Count the processor cores that this process may use; the machine may have more."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, by their names in ``CUDA_VISIBLE_DEVICES``."""
    import torch

    count = torch.cuda.device_count()  # CUDA ignores all names from the first wrong one on
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(number) for number in range(count)]


def processor_name() -> str:
    """Look up the processor's model name; its architecture if the system is not Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
