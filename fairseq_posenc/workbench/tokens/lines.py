"""Reads UTF-8 text line by line; an error names the line.

As in sacreBLEU, only a line feed ends a line.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import DAMAGED, read

_BLOCK = 1 << 16  # bytes; about a thousand sentences


def decode(content: bytes, name: str, refused: dict[bytes, str]) -> str:
    """Decode the content of a file, without a byte order mark; refuse some bytes by their names.

    Raises:
        UserError: the content is not UTF-8, or has such a byte; names the first line.
    """
    content, text = content.removeprefix(codecs.BOM_UTF8), ""
    places = {content.find(byte): what for byte, what in refused.items()}
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        places[error.start] = f"byte 0x{content[error.start]:02x} is not UTF-8"
    places.pop(-1, None)
    if not places:
        return text
    first = min(places)
    line = content.count(b"\n", 0, first) + 1
    raise UserError(f"{name}, line {line}: {places[first]}; save it as UTF-8 plain text")


def read_lines(path: Path, option: str) -> list[str]:
    """Read the lines of a text file, which may be compressed, without trailing white space.

    Raises:
        UserError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    name = f"{option} {path}"
    try:
        content = read(path)
    except (OSError, *DAMAGED) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: {reason}; name a UTF-8 text file") from None
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"{name}: the file is empty; name a file with text in it")
    return [_decode(line, name, number) for number, line in enumerate(lines, start=1)]


def arriving_lines(file: int, name: str) -> Iterator[list[str]]:
    """Yield lists of the lines that have arrived in an open file, given its descriptor.

    A terminal gives a line at a time, a long file about a thousand, so that a program that waits
    for each answer before it writes again gets it.

    Raises:
        UserError: a line is not UTF-8 text.
    """
    number, rest = 0, b""
    while block := _read(file, name):
        *whole, rest = (rest + block).split(b"\n")
        if whole:
            yield [_decode(line, name, number + index) for index, line in enumerate(whole, start=1)]
        number += len(whole)
    if rest:
        yield [_decode(rest, name, number + 1)]


def _read(file: int, name: str) -> bytes:
    try:
        return os.read(file, _BLOCK)
    except OSError as error:  # a folder, for one
        raise UserError(f"{name}: {error.strerror}; name a UTF-8 text file") from None


def _decode(line: bytes, name: str, number: int) -> str:
    try:
        return line.decode("utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; save it as UTF-8 "
            "plain text"
        ) from None
