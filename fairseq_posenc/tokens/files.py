"""Reads text files: decompressed, decoded, line by line; rows of Parquet as lines of JSON.

As in sacreBLEU, only a line feed ends a line. Errors name the line.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Union, cast

import zstandard

from fairseq_posenc.errors import UserError

PARQUET = ".parquet"
_BLOCK_BYTES = 1 << 16  # about a thousand sentences
_ROWS_AT_A_TIME = 1000  # of a Parquet file in memory
_MAX_WINDOW_BYTES = 1 << 31  # of earlier text to which zstd may refer


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frames of zstd; unlike zstandard's reader, refuse an incomplete last frame."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
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
    ".zst": lambda file: _Stream(_decompress_zstd(file)),
}
SEQUENTIAL = (*_OPENERS, PARQUET)  # suffixes of files that must be read from the beginning
# Errors that a damaged compressed file raises while it is read.
DAMAGE_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class _Stream(io.RawIOBase):
    """Presents an iterator of blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""  # bytes of the last block that were not read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:  # blocks may be empty, and a return value of 0 means the end
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def decompress(path: Union[str, Path], file: BinaryIO) -> BinaryIO:
    """Decompress an open file by the suffix of its name.

    Raises:
        UserError: the file is Parquet, and pyarrow is not installed.
    """
    suffix = Path(path).suffix
    if suffix == PARQUET:
        return io.BufferedReader(_Stream(_read_rows(path)))
    opener = _OPENERS.get(suffix)
    return cast("BinaryIO", opener(file)) if opener else file


def read_bytes(path: Path, name: str = "") -> bytes:
    """Read and decompress a whole file.

    Args:
        path: the file.
        name: name of the file in messages; its path by default.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            return decompress(path, file).read()
    except (OSError, *DAMAGE_ERRORS) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{name or path}: cannot be read ({reason}); name a file that can be read"
        ) from None


def _read_rows(path: Union[str, Path]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise UserError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(_ROWS_AT_A_TIME):
            lines = (json.dumps(row, ensure_ascii=False, default=str) for row in batch.to_pylist())
            yield "".join(f"{line}\n" for line in lines).encode()
    except ArrowInvalid as error:
        raise EOFError(str(error)) from None


def decode_text(
    content: bytes,
    name: str,
    refused: Mapping[bytes, str] = MappingProxyType({}),
    first_line: int = 1,
) -> str:
    """Decode UTF-8, and drop a byte-order mark at the beginning of a file.

    Args:
        content: the bytes.
        name: name of the file, for messages.
        refused: bytes that must not occur, and their names in messages.
        first_line: number of the first line of ``content`` in the file.

    Raises:
        UserError: the content is not UTF-8, or has a refused byte; names the line.
    """
    if first_line == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    text = ""
    # Index of the first byte of a kind -> what is wrong with it; -1 for bytes that do not occur.
    problems = {content.find(byte): label for byte, label in refused.items()}
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        problems[error.start] = f"byte 0x{content[error.start]:02x} is not UTF-8"
    problems.pop(-1, None)
    if not problems:
        return text
    first = min(problems)
    line = first_line + content.count(b"\n", 0, first)
    raise UserError(f"{name}, line {line}: {problems[first]}; save it as UTF-8 plain text")


def read_lines(path: Path, option: str) -> list[str]:
    """Read the lines of a text file, which may be compressed, without trailing white space.

    Raises:
        UserError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    name = f"{option} {path}"
    content = read_bytes(path, name)
    if not content:
        raise UserError(f"{name}: the file is empty; name a file with text in it")
    lines = decode_text(content, name).removesuffix("\n").split("\n")
    return [line.rstrip() for line in lines]


def read_arriving_lines(descriptor: int, name: str) -> Iterator[list[str]]:
    """Yield lists of lines as soon as they can be read from an open file.

    A program that writes to the file may wait for an answer before it writes the next line.

    Args:
        descriptor: the operating system's number of the open file.
        name: name of the file, for messages.

    Raises:
        UserError: a line is not UTF-8 text.
    """
    line_number, rest = 1, b""
    while block := _read_block(descriptor, name):
        complete, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            lines = decode_text(complete, name, first_line=line_number).split("\n")
            line_number += len(lines)
            yield [line.rstrip() for line in lines]
    if rest:
        yield [decode_text(rest, name, first_line=line_number).rstrip()]


def _read_block(descriptor: int, name: str) -> bytes:
    try:
        return os.read(descriptor, _BLOCK_BYTES)
    except OSError as error:  # for example, the file is a folder
        raise UserError(f"{name}: {error.strerror}; name a UTF-8 text file") from None
