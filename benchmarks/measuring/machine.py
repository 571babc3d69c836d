"""Where figures are from."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

import fairseq_posenc
from fairseq_posenc.workbench.running.devices import cores


def machine(device: torch.device) -> str:
    """Return a line that names the processor or GPU, and the versions."""
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        threads = torch.get_num_threads()
        where = f"{_processor()}, {cores()} cores, {threads} thread(s) used"
    return (
        f"{where}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"fairseq-posenc {fairseq_posenc.__version__}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
