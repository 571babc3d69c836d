"""Files and folders that are there while a process works, and deleted when it was killed."""

import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path

_MARK = ".posenc-"  # and eight digits, behind the name
_ALIVE = "fairseq-posenc-is-alive"


@contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """Make a file ``NAME.posenc-XXXXXXXX``, and delete it if it is still there at the end.

    What killed processes left under such a name is deleted first: a process locks what it makes as
    long as it lives. On a file system without locks nothing can tell, and leftovers stay.
    """
    for path in folder.glob(f"{glob.escape(name)}{_MARK}{'[0-9a-f]' * 8}"):
        _delete_abandoned(path, path)
    path, lock = _make(folder, name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def share_temporary_folder() -> None:
    """Let all processes of this program share one folder of multiprocessing's, ``pymp-*``.

    Each would have its own, and leave it behind: data loaders kill their workers. The first process
    deletes the folder when it ends; of a killed one, the next program does.
    """
    folder = Path(get_temp_dir())
    if not (folder / _ALIVE).exists():
        delete_temporary_folders()
        new = folder / f"{_ALIVE}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)  # until the process ends
        held = [lock]  # not in a fork of a fork, where the number may be another file's
        os.register_at_fork(after_in_child=lambda: _close(held))
        _lock(lock)
        new.rename(folder / _ALIVE)  # locked already: nobody takes the folder for abandoned


def delete_temporary_folders() -> None:
    """Delete the ``pymp-*`` folders that programs with this plugin left when they were killed."""
    for alive in Path(tempfile.gettempdir()).glob(f"pymp-*/{_ALIVE}"):
        _delete_abandoned(alive, alive.parent)


def _make(folder: Path, name: str) -> tuple[Path, int]:
    """Create a file, and lock it."""
    while True:
        path = folder / f"{name}{_MARK}{secrets.token_hex(4)}"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _lock(lock)
        if path.exists():  # else it passed for abandoned before it was locked
            return path, lock
        os.close(lock)


def _lock(file: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)


def _close(files: list[int]) -> None:
    """Close files, and forget them."""
    while files:
        os.close(files.pop())


def _delete_abandoned(locked: Path, path: Path) -> None:
    """Delete a file or a folder if the process that locked it has ended."""
    with suppress(OSError):  # somebody else's, or on a file system without locks
        lock = os.open(locked, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(lock)
