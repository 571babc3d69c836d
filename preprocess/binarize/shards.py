"""Lists the parts of files that a shard has: whole files, or whole lines of a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import SEQUENTIAL

_BLOCK_BYTES = 1 << 20


class Extent(NamedTuple):
    """Whole lines of a file, from byte ``start`` to ``end``; compressed files are never divided."""

    path: str
    start: int
    end: int
    sha256: str = ""  # checksum of the bytes, once it is computed

    def with_checksum(self) -> Extent:
        """Compute the checksum, which identifies the text wherever the file is."""
        return self._replace(sha256=checksum(Path(self.path), self.start, self.end))


def combine_checksums(parts: Sequence[Extent]) -> str:
    """Combine the checksums of several parts to one."""
    return hashlib.sha256(" ".join(part.sha256 for part in parts).encode()).hexdigest()


def find_files(inputs: Sequence[str]) -> list[str]:
    """List the input files; for a folder all files below it, sorted by path.

    Hidden files and folders, in which download programs keep their records, are left out.

    Raises:
        UserError: a path is missing, or all files are empty.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            below = [file for file in path.rglob("*") if file.is_file()]
            files += sorted(
                str(file) for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"
            )
        elif path.is_file():
            files.append(name)
        else:
            raise UserError(f"{name} is not there; give local files or directories")
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"no text in {', '.join(inputs)}")
    return files


def parts_of_shard(files: Sequence[str], shard: int = 0, num_shards: int = 1) -> list[Extent]:
    """List the parts of a shard, in order; by default those of the whole text.

    Shards have about the same number of bytes, or of files, if all files are compressed.

    Raises:
        UserError: the shard would be empty.
    """
    compressed = {path for path in files if Path(path).suffix in SEQUENTIAL}
    if len(compressed) < len(set(files)):
        weights = list(map(os.path.getsize, files))
    else:
        weights = [1] * len(files)
    # The shard has the weight from `begin` to `end`, and the compressed files that begin there.
    begin = sum(weights) * shard // num_shards
    end = sum(weights) * (shard + 1) // num_shards
    parts = []
    file_begin = 0  # weight of the files before this one
    for path, weight in zip(files, weights):
        if path in compressed:
            is_ours = begin <= file_begin < end
            part = Extent(path, 0, os.path.getsize(path) if is_ours else 0)
        else:
            offsets = (begin - file_begin, end - file_begin)
            start, stop = (_find_line_start(path, offset, weight) for offset in offsets)
            part = Extent(path, start, stop)
        if part.start < part.end:
            parts.append(part)
        file_begin += weight
    if not parts:
        raise UserError(
            f"shard {shard} of {num_shards} would be empty: lines and compressed files are not "
            "divided; use fewer shards"
        )
    return parts


def _find_line_start(path: str, offset: int, size: int) -> int:
    """Find the beginning of the first line at or after an offset, which may be out of the file."""
    if not 0 < offset < size:  # without opening it: of many files for many shards it takes hours
        return min(max(offset, 0), size)
    with open(path, "rb") as file:
        file.seek(offset - 1)
        while (line := file.readline(_BLOCK_BYTES)) and not line.endswith(b"\n"):
            continue
        return file.tell()
