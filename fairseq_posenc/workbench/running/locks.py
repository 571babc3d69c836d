"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.save_dir_lock import read_holder, write_holder
from fairseq_posenc.workbench.running.files import refuse_link
from fairseq_posenc.workbench.running.progress import say

LOCK = ".fairseq-posenc"
_held: set[int] = set()


@contextlib.contextmanager
def lock_folder(folder: Path, what: str = "--out") -> Iterator[int]:
    """Lock a folder for one run; yield the open lock, for the programs that the run starts.

    A program that outlives the run keeps the lock, so that nobody writes beside it: ``flock``
    belongs to the open file, which a program inherits. The locks of kept libraries (filelock,
    portalocker) and ``lockf`` end with the process that took them. Processes that are forked, as
    workers are, have no part in it: they end a moment after a run that is killed. On a file system
    without locks a warning takes their place.

    Args:
        folder: the folder; made if it does not exist.
        what: how messages introduce the folder, as the option that named it.

    Raises:
        UserError: the folder cannot be made or written to, or is in use; says by whom.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{what} {folder}: {error.strerror}; name another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = read_holder(lock)
        os.close(lock)
        raise UserError(
            f"{what} {folder}: {holder} is at work there; wait for its end, or name another folder"
        ) from None
    except OSError as error:  # a file system without locks
        if not _held:  # else the command has said so of the folder around this one
            reason = f"cannot be kept from a second run ({error.strerror})"
            say(f"{folder}: {reason}: start no other there")
    try:
        write_holder(lock)
        _held.add(lock)
        yield lock
    finally:
        _held.discard(lock)
        os.close(lock)


def _close_in_fork() -> None:
    """Close the locks of the parent process, in a fork."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)


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
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False
