"""Locks the folders of results, so that only one run works in each at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from fairseq_posenc import locks
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import refuse_link
from fairseq_posenc.workbench.running.progress import say

LOCK = ".fairseq-posenc"


@contextlib.contextmanager
def lock_folder(folder: Path, prefix: str = "--out") -> Iterator[int]:
    """Lock a folder for one run; yield the open lock, which the run's programs inherit.

    A program that outlives the run keeps the lock, so no other run writes into the folder. On a
    file system without locks, a warning is printed instead.

    Args:
        folder: the folder; made if it does not exist.
        prefix: text before the folder in messages, such as the option that named it.

    Raises:
        UserError: the folder cannot be made or written to, or another process holds its lock.
    """

    def warn(reason: str) -> None:
        say(f"{folder}: cannot be locked ({reason}): do not start a second run there")

    refusal = f"{prefix} {folder}: {{holder}} is running there; wait until it ends, or name another"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locks.acquire(folder / LOCK, f"{refusal} folder", warn)
    except OSError as error:
        raise UserError(f"{prefix} {folder}: {error.strerror}; name another folder") from None
    try:
        yield lock
    finally:
        locks.release(lock)


@contextlib.contextmanager
def lock_output_folder(folder: Path, known: Collection[str] = ()) -> Iterator[int]:
    """Lock a folder of results, after checking that it holds nothing else: steps may empty it.

    Args:
        folder: the folder; made if it does not exist.
        known: names of files that may lie there without a lock, such as results that are kept
            under version control.

    Raises:
        UserError: see :func:`lock_folder`; or the folder is a link, or holds other files.
    """
    refuse_link(folder)
    names = set(os.listdir(folder) if folder.is_dir() else ()) - set(known)
    if names and LOCK not in names:
        raise UserError(
            f"--out {folder}: holds other files ({min(names)}); name a new or empty folder"
        )
    with lock_folder(folder) as lock:
        yield lock


def is_locked(folder: Path) -> bool:
    """Check whether a run works in a folder; False on a file system without locks."""
    return locks.is_held(folder / LOCK)
