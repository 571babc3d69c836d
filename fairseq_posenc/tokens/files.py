"""Reads text files: decompressed, decoded, line by line.

As in sacreBLEU, only a line feed ends a line. Errors name the line.
"""

import bz2
import codecs
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError

_BLOCK_BYTES = 1 << 16  # about a thousand sentences
# By suffix: functions that open compressed files, of which no part can be read by itself.
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Errors of a file that cannot be read: OSError, or that of a damaged compressed one.
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_blocks(path: str | Path, size: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the content of a file in blocks, decompressed by the suffix of its name."""
    opener = OPENERS.get(Path(path).suffix, open)
    with opener(path, "rb") as file:
        while block := file.read(size):
            yield block


def read_bytes(path: Path, name: str = "") -> bytes:
    """Read and decompress a whole file.

    Args:
        path: the file.
        name: name of the file in messages; its path by default.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    try:
        return b"".join(read_blocks(path))
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        fault = f"cannot be read ({reason}); name a file that can be read"
        raise UserError(f"{name or path}: {fault}") from None


def decode_text(
    content: bytes, name: str, refused: Mapping[bytes, str] | None = None, first_line: int = 1
) -> str:
    """Decode UTF-8, and drop a byte-order mark at the beginning of a file.

    Args:
        content: the bytes.
        name: name of the file, for messages.
        refused: bytes that must not occur, and their names in messages.
        first_line: number of the first line of ``content`` in the file.

    Raises:
        UserError: the content is not UTF-8, or has a refused byte; the message names the line.
    """
    if first_line == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    text = ""  # stays empty if it is not UTF-8, which is then reported
    # Index of the first byte of a kind -> what is wrong with it; -1 for bytes that do not occur.
    problems = {content.find(byte): label for byte, label in (refused or {}).items()}
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
    name = f"{option} {path}"  # in messages; `option` named the file
    content = read_bytes(path, name)
    if not content:
        raise UserError(f"{name}: the file is empty; name a file with text in it")
    return [line.rstrip() for line in decode_text(content, name).removesuffix("\n").split("\n")]


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
    try:
        while block := os.read(descriptor, _BLOCK_BYTES):
            complete, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                lines = decode_text(complete, name, first_line=line_number).split("\n")
                line_number += len(lines)
                yield [line.rstrip() for line in lines]
    except OSError as error:  # for example, the file is a folder
        raise UserError(f"{name}: {error.strerror}; name a UTF-8 text file") from None
    if rest:
        yield [decode_text(rest, name, first_line=line_number).rstrip()]
