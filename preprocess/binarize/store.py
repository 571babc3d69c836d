"""fairseq's mmap format, written in constant memory and continued after an interruption."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset, _dtype_header_code

_BLOCK = 1 << 20
SIZE = np.dtype(np.int32)  # what an .idx file holds the sizes in


class Position(NamedTuple):
    """How much of a data set is safely on disk."""

    items: int = 0
    tokens: int = 0


class Store:
    """``PREFIX.bin`` and ``PREFIX.idx``, byte for byte as fairseq writes them.

    ``PREFIX.sizes`` holds what the index is made from, until it is no longer needed to go on.

    Args:
        prefix: path without ending.
        dtype: of the numbers, as fairseq chooses it for the size of the dictionary.
        position: what :meth:`sync` returned; whatever was written after it is dropped.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, position: Position) -> None:
        self.prefix, self.dtype, self.position = prefix, dtype, position
        self._bin = open_at(prefix.with_suffix(".bin"), position.tokens * dtype.itemsize)
        self._sizes = open_at(prefix.with_suffix(".sizes"), position.items * SIZE.itemsize)

    def append(self, tokens: bytes, sizes: bytes) -> None:
        """Add items: the numbers of all of them, and how many each has."""
        self._bin.write(tokens)
        self._sizes.write(sizes)
        self.position = Position(
            self.position.items + len(sizes) // SIZE.itemsize,
            self.position.tokens + len(tokens) // self.dtype.itemsize,
        )

    def sync(self) -> Position:
        """Bring everything to the disk and return how much it is."""
        for file in (self._bin, self._sizes):
            file.flush()
            os.fsync(file.fileno())
        return self.position

    def close(self) -> None:
        """Close the files as they are."""
        self._bin.close()
        self._sizes.close()

    def finish(self) -> None:
        """Write the index, and have fairseq's own reader confirm the counts."""
        self.sync()
        self.close()
        sizes_path = self.prefix.with_suffix(".sizes")
        with open(self.prefix.with_suffix(".idx"), "wb") as index:
            index.write(MMapIndexedDataset.Index._HDR_MAGIC)
            code = _dtype_header_code(self.dtype.type)
            index.write(struct.pack("<QBQ", 1, code, self.position.items))
            for sizes in _blocks(sizes_path):
                index.write(sizes.tobytes())
            address = 0
            for sizes in _blocks(sizes_path):
                ends = address + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
                index.write(np.concatenate([[address], ends[:-1]]).astype(np.int64).tobytes())
                address = int(ends[-1])
            index.flush()
            os.fsync(index.fileno())
        self._check(address)

    def _check(self, bytes_by_sizes: int) -> None:
        read = MMapIndexedDataset.Index(str(self.prefix.with_suffix(".idx")))
        found = (len(read), read.dtype, os.path.getsize(self.prefix.with_suffix(".bin")))
        expected = (self.position.items, self.dtype.type, bytes_by_sizes)
        if found != expected or bytes_by_sizes != self.position.tokens * self.dtype.itemsize:
            raise RuntimeError(f"{self.prefix}: {found} on disk, but {expected} were written")


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file to write on after its first bytes; what comes after them is dropped."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115  (closed by the store)
    file.truncate(size)
    file.seek(size)
    return file


def _blocks(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK * SIZE.itemsize):
            yield np.frombuffer(block, dtype=SIZE)
