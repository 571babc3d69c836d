"""Files: written whole, brought to the disk, identified by their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.leftovers import temporary_file
from fairseq_posenc.errors import UserError, shortened

# Characters that end or turn a line, which no path may have.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BLOCK = 1 << 20  # bytes
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
    stays as it is. A device or a pipe is written in place.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    with temporary_file(path.parent, path.name) as new:
        yield new
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, new)
        sync(new)
        os.replace(new, path)


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
