"""Devices: processor cores, GPUs and the precision on them."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError

if TYPE_CHECKING:
    import torch


def choose_device(device: Optional[str] = None, fp16: bool = False) -> str:
    """Choose the device to compute on.

    Args:
        device: the requested device; None for a GPU if there is one.
        fp16: whether in half precision.

    Raises:
        UserError: there is no such device, or half precision was requested without a GPU.
    """
    import torch  # slow, and not needed for the number of cores

    available = torch.cuda.is_available()
    device = device or ("cuda" if available else "cpu")
    if device.startswith("cuda") and not available:
        raise UserError(f"--device {device}: torch finds no GPU here; use --device cpu")
    if fp16 and device == "cpu":
        raise UserError("--fp16 is for GPUs; leave it out, or use --device cuda")
    return device


def choose_dtype(fp16: bool = False, bf16: bool = False) -> torch.dtype:
    """Choose the precision to compute in: float32 unless another is requested."""
    import torch

    return torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32


class Computing(NamedTuple):
    """Device and precision of a model.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of its parameters; None leaves them as they are.
    """

    device: str = "cpu"
    dtype: Optional[torch.dtype] = None

    @classmethod
    def chosen(
        cls, device: Optional[str] = None, fp16: bool = False, bf16: bool = False
    ) -> Computing:
        """Choose from ``--device``, ``--fp16`` and ``--bf16``; float32 without either.

        Raises:
            UserError: see :func:`choose_device`.
        """
        return cls(choose_device(device, fp16), choose_dtype(fp16, bf16))

    def place(self, model: Any) -> Any:
        """Move a model to the device, in evaluation mode."""
        return model.to(device=self.device, dtype=self.dtype).eval()


PLAIN = Computing()


def hydra_words(args: Namespace, here: bool = True) -> list[str]:
    """Format ``--device``, ``--fp16`` and ``--bf16`` as overrides of fairseq's settings.

    Args:
        args: with these options.
        here: whether it is this machine that computes.

    Raises:
        UserError: see :func:`choose_device`.
    """
    if here:
        choose_device(args.device, args.fp16)
    words = ["common.cpu=true"] if args.device == "cpu" else []
    if args.fp16 or args.bf16 or words:
        values = {"fp16": args.fp16, "bf16": args.bf16}
        words += [f"common.{name}={str(value).lower()}" for name, value in values.items()]
    return words


def cores() -> int:
    """Count the processor cores that this process may use, perhaps fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """List the GPUs by their names in ``CUDA_VISIBLE_DEVICES``, those of the user's choice."""
    import torch

    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]


def processor_name() -> str:
    """Look up the processor's name as people know it, where the system tells it."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
