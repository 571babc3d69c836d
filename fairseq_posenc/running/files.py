"""Files: written whole, brought to the disk, and told apart by their checksums."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BLOCK = 1 << 20  # bytes


def checksum(path: Path, start: int = 0, end: int = sys.maxsize) -> str:
    """Return the SHA-256 sum of a file, or of its bytes from start to end."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(_BLOCK, end - start))):
            digest.update(block)
            start += len(block)
    return digest.hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which gets its name once it is whole and on the disk.

    An interruption leaves the old file or the new one, never half of it.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that an interruption leaves the old one or the new one."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
