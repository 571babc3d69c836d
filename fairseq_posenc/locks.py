"""Locks of folders: held by a process, with its name in them, until it ends or lets go."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairseq_posenc.errors import UserError

_held: set[int] = set()


def acquire(path: Path, refusal: str, warn: Callable[[str], object]) -> int:
    """Lock a file and return it open; :func:`release` or the end of the process unlocks it.

    A program that outlives the process keeps a lock that it was given: ``flock`` belongs to the
    open file, which a program inherits. The locks of kept libraries (filelock, portalocker) and
    ``lockf`` end with the process that took them. Processes that are forked, as workers are, have
    no part in it: they end a moment after a process that is killed.

    Args:
        path: the file; made if it does not exist.
        refusal: message for a lock that another process holds, which is put in for ``{holder}``.
        warn: called with the reason where the file system has no locks, for the outermost folder.

    Raises:
        UserError: the lock is held.
        OSError: the file cannot be made or opened.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode() or "another process"
        os.close(lock)
        raise UserError(refusal.replace("{holder}", holder)) from None
    except OSError as error:
        if not _held:
            warn(str(error.strerror))
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {now},"
    with suppress(OSError):  # on a full disk the lock has no name in it
        os.ftruncate(lock, 0)
        os.pwrite(lock, text.encode(), 0)
    _held.add(lock)
    return lock


def release(lock: int) -> None:
    """Unlock a file that :func:`acquire` locked."""
    _held.discard(lock)
    os.close(lock)


def is_held(path: Path) -> bool:
    """Check whether a process holds a lock; False on a file system without locks."""
    with suppress(OSError):  # no such file, or a file system without locks
        lock = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _close_in_fork() -> None:
    """Close the locks of the parent process, in a fork."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)
