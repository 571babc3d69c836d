"""Writes fairseq's mmap format in constant memory, and resumes after an interruption.

``.bin`` has the tokens of all items; ``.idx`` a header, the size of each item and the byte of
``.bin`` at which it begins. Private names of fairseq are used so that the header is fairseq's.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset, _dtype_header_code

_SIZES_PER_BLOCK = 1 << 20
SIZE = np.dtype(np.int32)  # type of the sizes in an .idx file


class Position(NamedTuple):
    """A place in a data set, by the number of items and tokens before it."""

    items: int = 0
    tokens: int = 0


class Store:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx``, byte for byte as fairseq does.

    The index is made at the end from ``PREFIX.sizes``; see :func:`delete_sizes`.

    Args:
        prefix: path without suffix.
        dtype: type of the tokens, which fairseq chooses by the size of the dictionary.
        position: result of :meth:`sync`; everything written after that is dropped.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, position: Position) -> None:
        self.prefix, self.dtype, self.position = prefix, dtype, position
        self._bin = open_at(_add_suffix(prefix, ".bin"), position.tokens * dtype.itemsize)
        self._sizes = open_at(_add_suffix(prefix, ".sizes"), position.items * SIZE.itemsize)

    def append(self, tokens: bytes, sizes: bytes) -> None:
        """Append items: the tokens of all items, and the size of each."""
        self._bin.write(tokens)
        self._sizes.write(sizes)
        self.position = Position(
            self.position.items + len(sizes) // SIZE.itemsize,
            self.position.tokens + len(tokens) // self.dtype.itemsize,
        )

    def sync(self) -> Position:
        """Sync everything to disk, and return its end."""
        for file in (self._bin, self._sizes):
            file.flush()
            os.fsync(file.fileno())
        return self.position

    def close(self) -> None:
        """Close the files without an index."""
        self._bin.close()
        self._sizes.close()

    def finish(self) -> None:
        """Write the index, and check the counts with fairseq's reader."""
        self.sync()
        self.close()
        sizes_path = _add_suffix(self.prefix, ".sizes")
        with open(_add_suffix(self.prefix, ".idx"), "wb") as index:
            index.write(MMapIndexedDataset.Index._HDR_MAGIC)
            code = _dtype_header_code(self.dtype.type)
            version = 1
            index.write(struct.pack("<QBQ", version, code, self.position.items))
            for sizes in _read_sizes(sizes_path):
                index.write(sizes.tobytes())
            begin = 0  # byte of .bin
            for sizes in _read_sizes(sizes_path):
                ends = begin + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
                index.write(np.concatenate([[begin], ends[:-1]]).astype(np.int64).tobytes())
                begin = int(ends[-1])
            index.flush()
            os.fsync(index.fileno())
        self._check(bin_bytes=begin)

    def _check(self, bin_bytes: int) -> None:
        """Compare the files with the counts; the sizes of all items add up to ``bin_bytes``."""
        index = MMapIndexedDataset.Index(str(_add_suffix(self.prefix, ".idx")))
        written = (len(index), index.dtype, os.path.getsize(_add_suffix(self.prefix, ".bin")))
        expected = (self.position.items, self.dtype.type, bin_bytes)
        if written != expected or bin_bytes != self.position.tokens * self.dtype.itemsize:
            raise RuntimeError(f"{self.prefix}: {written} on disk, but {expected} were written")


def delete_sizes(prefix: Path) -> None:
    """Delete ``PREFIX.sizes``, from which an interrupted run resumes, of a data set that is done.

    Call it after the data set is recorded as done, and again if that call may have been killed.
    """
    _add_suffix(prefix, ".sizes").unlink(missing_ok=True)


def _add_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for writing after its first ``size`` bytes, and drop the rest."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115  (closed by the store)
    file.truncate(size)
    file.seek(size)
    return file


def _read_sizes(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while block := file.read(_SIZES_PER_BLOCK * SIZE.itemsize):
            yield np.frombuffer(block, dtype=SIZE)
