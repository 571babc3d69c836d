"""Settings that must be set before a process starts."""

from __future__ import annotations

import logging
import os
import sys

SETTINGS = {
    # Otherwise glibc returns large tensors to the system after each pass, and the time to allocate
    # them again depends on other programs as well.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    # Otherwise torch's profiler and fairseq's libraries print many messages.
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def restart_with_settings() -> None:
    """Restart this script with :data:`SETTINGS`, unless it has them; silence fairseq.

    Scripts that measure passes or use fairseq's trainer call it before they import torch: the
    allocator and torch's libraries read the settings only when they start.
    """
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, {**os.environ, **SETTINGS})
    silence_logging()


def silence_logging() -> None:
    """Keep fairseq from printing every model."""
    logging.disable(logging.WARNING)
