"""A lock that allows one training at a time in a ``--save-dir``, and its holder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_posenc.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)
_LOCK = ".fairseq-train"
_held: dict[Path, int] = {}  # open until the process ends


def lock_save_dir(settings: DictConfig) -> None:
    """Keep other trainings out of a ``--save-dir``, until this process ends.

    The first of all ranks does it for them. ``lockf`` ends with the process, unlike a lock that
    workers of a data loader would inherit and keep for some seconds after a kill.

    Raises:
        UserError: another training writes its checkpoints there; names it.
    """
    folder = Path(settings.checkpoint.save_dir).resolve()
    rank = settings.distributed_training.distributed_rank
    if rank != 0 or settings.checkpoint.no_save or folder in _held or not folder.is_dir():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = read_holder(lock)
        os.close(lock)
        raise UserError(
            f"--save-dir {folder}: {holder} trains there; wait for its end, or name another folder"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning(f"{folder}: cannot be kept from a second training ({error.strerror})")
    write_holder(lock)
    _held[folder] = lock


def write_holder(lock: int) -> None:
    """Write this process as the holder into a lock's file."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}, since {now},".encode(), 0)


def read_holder(lock: int) -> str:
    """Read the holder of a lock: process, machine and since when."""
    return os.pread(lock, 200, 0).decode() or "another process"
