"""Locks folders for one process at a time; a lock file names the process that holds it."""

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from fairseq_posenc.errors import UserError

_held: set[int] = set()  # descriptors of our lock files, even if they could not be locked


def acquire(path: Path, folder: str) -> int:
    """Lock a file and return its descriptor; :func:`release` or the end of the process unlocks it.

    A child program that is passed the descriptor (``pass_fds``) holds the lock for as long as it
    lives, even if this process is killed: ``flock`` belongs to the open file, ``lockf`` to the
    process. Forked workers do not hold it, as they may live a moment longer than a killed process.

    On a file system without locks, a warning is printed instead, once for all locks held there.

    Args:
        path: the file; created if it does not exist.
        folder: the folder that it locks, as messages name it.

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
        advice = "wait until it ends, or name another folder"
        raise UserError(f"{folder}: {holder} is running there; {advice}") from None
    except OSError as error:
        if os.fstat(lock).st_dev not in {os.fstat(other).st_dev for other in _held}:
            reason = f"cannot be locked ({error.strerror}): do not start a second run there"
            print(f"{folder}: {reason}", file=sys.stderr)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {now},"  # as read above
    with suppress(OSError):  # on a full disk, the lock file cannot name the process
        os.ftruncate(lock, 0)
        os.pwrite(lock, holder.encode(), 0)
    _held.add(lock)
    return lock


def release(lock: int) -> None:
    """Unlock a file that :func:`acquire` locked, unless a fork has closed it in this process."""
    if lock in _held:
        _held.remove(lock)
        os.close(lock)


def _close_in_fork() -> None:
    """Close the parent's locks in a forked process."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)
