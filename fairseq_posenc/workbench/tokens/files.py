"""Opens published files: decompresses, and reads Parquet as a JSON object a line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Union, cast

import zstandard

from fairseq_posenc.errors import UserError

PARQUET = ".parquet"
_ROWS = 1000  # rows of a Parquet file in memory at a time
_LARGEST_WINDOW = 1 << 31  # bytes; how far back zstd may refer


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress one or several frames; unlike zstandard's own reader, refuse an incomplete one."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    data = file.read(zstandard.DECOMPRESSION_RECOMMENDED_INPUT_SIZE)
    while data:
        frame = decompressor.decompressobj()
        while not frame.eof:
            if not data:
                raise EOFError("the last frame has no end")
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else b""
            data = data or file.read(zstandard.DECOMPRESSION_RECOMMENDED_INPUT_SIZE)


_OPENERS: dict[str, Callable[..., object]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: _Stream(_zstd(file)),
}
WHOLE = (*_OPENERS, PARQUET)  # suffixes of files that can only be read from the beginning
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class _Stream(io.RawIOBase):
    """A file made of blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = block
        view = memoryview(buffer)  # type: ignore[arg-type]
        size = min(len(view), len(self._left))
        view[:size], self._left = self._left[:size], self._left[size:]
        return size


def contents(path: Union[str, Path], file: BinaryIO) -> BinaryIO:
    """Decompress an open file, as the suffix of its name says.

    Raises:
        UserError: a Parquet file, and pyarrow is not installed.
    """
    suffix = Path(path).suffix
    if suffix == PARQUET:
        return io.BufferedReader(_Stream(_rows(path)))
    opener = _OPENERS.get(suffix)
    return cast("BinaryIO", opener(file)) if opener else file


def read(path: Path) -> bytes:
    """Read a whole file; an OSError or one of ``DAMAGED`` if it cannot be read."""
    with open(path, "rb") as file:
        return contents(path, file).read()


def _rows(path: Union[str, Path]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise UserError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(_ROWS):
            lines = (json.dumps(row, ensure_ascii=False, default=str) for row in batch.to_pylist())
            yield "".join(f"{line}\n" for line in lines).encode()
    except ArrowInvalid as error:
        raise EOFError(str(error)) from None
