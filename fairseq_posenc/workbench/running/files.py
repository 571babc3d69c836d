"""Files: written whole, brought to the disk, identified by their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.leftovers import temporary_file
from fairseq_posenc.error_messages import find_full_disk
from fairseq_posenc.errors import UserError, shortened

_BLOCK = 1 << 20  # bytes
_SYSTEM = ("/dev", "/proc", "/sys")  # not places for files
_SHARED_MEMORY = "/dev/shm"
_PACKAGE = Path(__file__).resolve().parents[2]


def checksum(path: Path, start: int = 0, end: int = sys.maxsize) -> str:
    """Compute the SHA-256 sum of a file, or of its bytes from start to end."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(_BLOCK, end - start))):
            digest.update(block)
            start += len(block)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file from which a command continues.

    Raises:
        UserError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path}: cannot be read ({reason}); delete it to make it anew") from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which gets its name once it is whole and on the disk.

    An interruption leaves the old file or the new one, never half of it. Each writer has a
    :func:`~fairseq_posenc.checkpoints.leftovers.temporary_file` of its own: of two with one path,
    the last wins. An older file's permissions are kept. A link is replaced, and what it points to
    stays as it is.

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
    """Refuse a place where no file can be: a missing folder, a folder, a device, a pipe, a socket.

    In the folders of devices nothing is replaced either: ``/dev/stdout`` is a link.

    Args:
        path: where a file shall be written.
        what: how the message introduces the path, as the option that named it.

    Raises:
        UserError: says what is there.
    """
    name, folder = f"{what} {path}".lstrip(), path.parent.resolve()
    if not folder.is_dir() or path.is_dir():
        why = "this is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{name}: name a file in a folder that there is: {why}")
    is_system = any(map(folder.is_relative_to, _SYSTEM))
    is_device = is_system and not folder.is_relative_to(_SHARED_MEMORY)
    if is_device or (path.exists() and not path.is_file()):
        raise UserError(f"{name}: is a device, a pipe or a socket; name a file")


def refuse_link(folder: Path, what: str = "--out") -> None:
    """Refuse a link as the folder of results, whose files would be written somewhere else.

    Raises:
        UserError: names the place that it leads to.
    """
    if folder.is_symlink():
        raise UserError(
            f"{what} {folder}: is a link to {folder.resolve()}; name that folder itself, or another"
        )


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


def shipped(name: str) -> Path:
    """Find a folder that is within the package in a wheel and beside it in a checkout."""
    within = _PACKAGE / name
    return within if within.is_dir() else _PACKAGE.parent / name
