"""One run at a time in a folder."""

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
def lock_folder(folder: Path, what: str = "--out") -> Iterator[int]:
    """Lock a folder for one run; yield the open lock, for the programs that the run starts.

    A program that outlives the run keeps the lock, so that nobody writes beside it. On a file
    system without locks a warning takes their place.

    Args:
        folder: the folder; made if it does not exist.
        what: how messages introduce the folder, as the option that named it.

    Raises:
        UserError: the folder cannot be made or written to, or is in use; says by whom.
    """

    def warn(reason: str) -> None:
        say(
            f"{folder}: cannot be kept from a second run ({reason}): do not start a second one "
            "there"
        )

    refusal = (
        f"{what} {folder}: {{holder}} is running there; wait until it ends, or name another folder"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locks.acquire(folder / LOCK, refusal, warn)
    except OSError as error:
        raise UserError(f"{what} {folder}: {error.strerror}; name another folder") from None
    try:
        yield lock
    finally:
        locks.release(lock)


@contextlib.contextmanager
def lock_output_folder(folder: Path, known: Collection[str] = ()) -> Iterator[int]:
    """Lock a folder that has nothing but what runs put there, as their stages may delete it.

    Args:
        folder: the folder; made if it does not exist.
        known: names of files that may lie in it although no run has held it, as the results do
            where they are kept under version control.

    Raises:
        UserError: see :func:`lock_folder`; or the folder is a link, or holds files of somebody
            else.
    """
    refuse_link(folder)
    others = set(os.listdir(folder) if folder.is_dir() else ()) - set(known)
    if others and LOCK not in others:
        raise UserError(
            f"--out {folder}: holds other files ({min(others)}); name a new or empty folder"
        )
    with lock_folder(folder) as lock:
        yield lock


def is_locked(folder: Path) -> bool:
    """Check whether a run is at work in a folder; False on a file system without locks."""
    return locks.is_held(folder / LOCK)
