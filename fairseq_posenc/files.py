"""Write files whole, and delete those that killed processes left, which are no longer locked."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fairseq_posenc.error_messages import find_full_disk
from fairseq_posenc.errors import UserError

_MARK = ".posenc-"  # and eight digits, behind the name
_SYSTEM = ("/dev", "/proc", "/sys")  # not places for files
_SHARED_MEMORY = "/dev/shm"


@contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """Make a file ``NAME.posenc-XXXXXXXX``, and delete it if it is still there at the end.

    Files that killed processes left under such a name are deleted first: a process keeps its own
    locked while it lives. On a file system without locks such leftovers stay.
    """
    for path in folder.glob(f"{glob.escape(name)}{_MARK}{'[0-9a-f]' * 8}"):
        delete_abandoned(path, path)
    path, lock = _make_locked(folder, name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which gets its name once it is whole and on the disk.

    An interruption leaves the old file or the new one, never half of it. Each writer has a
    :func:`temporary_file` of its own: of two with one path, the last wins. An older file's
    permissions are kept. A link is replaced, and what it points to stays as it is.

    Raises:
        UserError: the place is not one for a file.
    """
    refuse_bad_place(path)
    with errors_that_name(path), temporary_file(path.parent, path.name) as new:
        yield new
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, new)
        sync(new)
        os.replace(new, path)


@contextmanager
def errors_that_name(path: Path) -> Iterator[None]:
    """Let errors of a full disk, or of a temporary file, name what is written as the user does."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if code := find_full_disk(error):
            raise OSError(code, os.strerror(code), str(path)) from error
        if isinstance(error, OSError) and str(error.filename).startswith(f"{path}."):
            error.filename = str(path)
        raise


def refuse_bad_place(path: Path, what: str = "") -> None:
    """Refuse a path that cannot be a file: in no folder, or a folder, a device, a pipe, a socket.

    In the folders of devices nothing is replaced either: ``/dev/stdout`` is a link.

    ``what`` introduces the path in the message, as the option that named it.

    Raises:
        UserError: says what is there.
    """
    name, folder = f"{what} {path}".lstrip(), path.parent.resolve()
    if not folder.is_dir() or path.is_dir():
        why = "this is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{name}: name a file in an existing folder: {why}")
    is_system = any(map(folder.is_relative_to, _SYSTEM))
    is_device = is_system and not folder.is_relative_to(_SHARED_MEMORY)
    if is_device or (path.exists() and not path.is_file()):
        raise UserError(f"{name}: is a device, a pipe or a socket; name a file")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that an interruption leaves the old one or the new one."""
    with written_whole(path) as new:
        new.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_locked(folder: Path, name: str) -> tuple[Path, int]:
    """Create a file, and lock it."""
    while True:
        path = folder / f"{name}{_MARK}{secrets.token_hex(4)}"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock_if_possible(lock)
        if path.exists():  # else it passed for abandoned before it was locked
            return path, lock
        os.close(lock)


def lock_if_possible(file: int) -> None:
    """Lock an open file, but for a file system without locks."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def delete_abandoned(locked: Path, path: Path) -> None:
    """Delete a file or a folder if the process that locked it has ended."""
    with suppress(OSError):  # somebody else's, or on a file system without locks
        lock = os.open(locked, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(lock)
