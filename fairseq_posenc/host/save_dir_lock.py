"""A lock that allows one training at a time in a ``--save-dir``."""

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
    """Keep other trainings out of a ``--save-dir``, until this process ends.

    The first of all ranks does it for them.

    Raises:
        UserError: another training writes its checkpoints there; names it.
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
