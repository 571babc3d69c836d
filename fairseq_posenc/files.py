"""Writes files atomically, and deletes the temporary files of killed processes.

A process keeps its temporary files locked, so an unlocked one is abandoned.
"""

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

_MARK = ".posenc-"  # a temporary file is NAME.posenc-XXXXXXXX, with hexadecimal digits
_SYSTEM = ("/dev", "/proc", "/sys")  # folders of devices, and of files that the kernel makes


@contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """Create a file ``NAME.posenc-XXXXXXXX``, and delete it at the end unless it was renamed.

    Abandoned files of such names are deleted first, except on a file system without locks.
    """
    for path in folder.glob(f"{glob.escape(name)}{_MARK}{'[0-9a-f]' * 8}"):
        delete_abandoned(path, path)  # such a file is its own lock
    while True:
        path = folder / f"{name}{_MARK}{secrets.token_hex(4)}"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # the mode of `open`
        lock_if_possible(lock)
        if path.exists():
            break
        os.close(lock)  # another process deleted the file as abandoned before it was locked
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; then sync the file to disk and rename it to ``path``.

    An interruption leaves the old file or the new one, never half of it. If two processes write
    ``path`` at once, the last one wins. The permissions of the old file are kept. A link is
    replaced; its target stays as it is.

    Raises:
        UserError: ``path`` cannot be a file (:func:`refuse_bad_place`).
    """
    refuse_bad_place(path)
    with errors_that_name(path), temporary_file(path.parent, path.name) as temporary:
        yield temporary
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, temporary)
        sync(temporary)
        os.replace(temporary, path)


@contextmanager
def errors_that_name(path: Path) -> Iterator[None]:
    """Make errors of a full disk, or of a temporary file, name the path that the user gave."""
    try:
        yield
    except UserError:  # names the path already
        raise
    except Exception as error:
        if code := find_full_disk(error):
            raise OSError(code, os.strerror(code), str(path)) from error
        if isinstance(error, OSError) and str(error.filename).startswith(f"{path}{_MARK}"):
            error.filename = str(path)
        raise


def refuse_bad_place(path: Path, prefix: str = "") -> None:
    """Refuse a path whose folder does not exist, or which is a folder, device, pipe or socket.

    Links below ``/dev``, such as ``/dev/stdout``, are refused, too: they would be replaced.

    Args:
        path: the file to write.
        prefix: text before the path in the message, such as the option that named it.
    """
    name = f"{prefix} {path}".lstrip()
    folder = path.parent.resolve()
    if not folder.is_dir() or path.is_dir():
        why = "this is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{name}: name a file in an existing folder: {why}")
    is_system = any(folder.is_relative_to(system) for system in _SYSTEM)
    is_device = is_system and not folder.is_relative_to("/dev/shm")  # which holds ordinary files
    if is_device or (path.exists() and not path.is_file()):
        raise UserError(f"{name}: name a file: this is a device, a pipe or a socket")


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically (:func:`written_whole`)."""
    with written_whole(path) as new:
        new.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_if_possible(file: int) -> None:
    """Lock an open file; on a file system without locks do nothing."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def delete_abandoned(lock_file: Path, path: Path) -> None:
    """Delete a file or folder ``path`` if no process holds the lock on the file ``lock_file``."""
    with suppress(OSError):  # locked, another user's, or on a file system without locks
        lock = os.open(lock_file, os.O_RDWR | os.O_NOFOLLOW)  # never the target of a link
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(lock)
