"""Where figures are from."""

from __future__ import annotations

import platform

import torch

import fairseq_posenc
from fairseq_posenc.workbench.running.devices import cores, processor_name


def machine(device: torch.device) -> str:
    """Return a line that names the processor or GPU, and the versions."""
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        threads = torch.get_num_threads()
        where = f"{processor_name()}, {cores()} cores, {threads} thread(s) used"
    return (
        f"{where}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"fairseq-posenc {fairseq_posenc.__version__}"
    )
