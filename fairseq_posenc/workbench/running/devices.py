"""Chooses the device and the precision to compute in, and counts cores and GPUs."""

import os
from typing import Any

import torch

from fairseq_posenc.errors import UserError


def choose_device() -> str:
    """Choose a GPU if there is one, else the CPU; ``CUDA_VISIBLE_DEVICES=`` hides GPUs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(fp16: bool, bf16: bool) -> torch.dtype:
    """Choose the precision by ``--fp16`` and ``--bf16``; float32 without either.

    Raises:
        UserError: ``--fp16`` was given on the CPU.
    """
    if fp16 and choose_device() == "cpu":
        raise UserError("--fp16 is for GPUs, and torch finds none here; leave it out")
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32


def place(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model, move it to the chosen device, and set it to evaluation mode."""
    return model.to(device=choose_device(), dtype=dtype).eval()


def count_cores() -> int:
    """Count the processor cores that this process may use; the machine may have more."""
    is_known = hasattr(os, "sched_getaffinity")  # which macOS lacks
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1


def list_gpus() -> list[str]:
    """List this process's GPUs: names in ``CUDA_VISIBLE_DEVICES``, or numbers if it is unset."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")  # from a wrong one on, CUDA ignores them
    return names.split(",")[:count] if names else [str(number) for number in range(count)]
