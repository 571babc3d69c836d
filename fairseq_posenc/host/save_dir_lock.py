"""Locks a ``--save-dir``, so that only one training at a time writes checkpoints there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_posenc import locks

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)
_LOCK = ".fairseq-train"
_held: dict[Path, int] = {}  # open until the process ends


def lock_save_dir(settings: DictConfig) -> None:
    """Lock a ``--save-dir`` until this process ends; only rank 0 does so, for all ranks.

    Raises:
        UserError: another training holds the lock; names its process.
    """
    folder = Path(settings.checkpoint.save_dir).resolve()
    rank = settings.distributed_training.distributed_rank
    if rank != 0 or settings.checkpoint.no_save or folder in _held or not folder.is_dir():
        return
    refusal = (
        f"--save-dir {folder}: {{holder}} trains there; wait until it ends, or name another folder"
    )

    def warn(reason: str) -> None:
        logger.warning(f"{folder}: cannot be locked against a second training ({reason})")

    _held[folder] = locks.acquire(folder / _LOCK, refusal, warn)
