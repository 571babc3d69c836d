"""Selects the files, and the bytes of them, that a shard is made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import WHOLE

_BLOCK_BYTES = 1 << 20


class Part(NamedTuple):
    """Whole lines of a file, bytes ``start`` to ``end``; a compressed file is never divided."""

    path: str
    start: int
    end: int


def find_files(inputs: Sequence[str]) -> list[str]:
    """List the given files; for a folder all files below it, sorted by path.

    Hidden files and folders are left out: download programs keep their own files there.

    Raises:
        UserError: a path is missing, or all files are empty.
    """
    files: list[str] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            below = (file for file in path.rglob("*") if file.is_file())
            visible = (
                file for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"
            )
            files += sorted(map(str, visible))
        elif path.is_file():
            files.append(given)
        else:
            raise UserError(f"{given} is not there; give local files or directories")
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"no text in {', '.join(inputs)}")
    return files


def parts_of_shard(files: Sequence[str], shard: int, num_shards: int) -> list[Part]:
    """List the parts of one of several shards, in order.

    Shards have about the same number of bytes; of files, if all are compressed.

    Raises:
        UserError: the shard would be empty.
    """
    whole = {path for path in files if Path(path).suffix in WHOLE}  # compressed
    by_bytes = len(whole) < len(set(files))
    sizes = [os.path.getsize(path) if by_bytes else 1 for path in files]
    low, high = (sum(sizes) * number // num_shards for number in (shard, shard + 1))
    parts, begins = [], 0
    for path, size in zip(files, sizes):
        if path in whole:
            start, end = 0, os.path.getsize(path) if low <= begins < high else 0
        else:
            start = _line_start(path, min(max(low - begins, 0), size), size)
            end = _line_start(path, min(max(high - begins, 0), size), size)
        if start < end:
            parts.append(Part(path, start, end))
        begins += size
    if not parts:
        raise UserError(
            f"shard {shard} of {num_shards} would be empty: lines and compressed files are not "
            "divided; use fewer shards"
        )
    return parts


def _line_start(path: str, offset: int, size: int) -> int:
    """Find the beginning of the first line at or after an offset."""
    if offset in (0, size):  # as in most of many files: opened by each shard, they take hours
        return offset
    with open(path, "rb") as file:
        file.seek(offset - 1)
        while (line := file.readline(_BLOCK_BYTES)) and not line.endswith(b"\n"):
            continue
        return file.tell()
