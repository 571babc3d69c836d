"""Reads parts of files as chunks of whole lines: :class:`SourceChunk` and decompressed bytes."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import DAMAGE_ERRORS, decompress

from .shards import Extent

CHUNK_BYTES = 1 << 20
# Control characters, without white space (0x09 to 0x0d), escape, and separators of records.
_CONTROLS = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B)])
_MAX_CONTROL_SHARE = 0.03  # of the bytes of a text
_MAX_LINE_BYTES = 1 << 28  # a chunk is held in memory several times


class SourceChunk(NamedTuple):
    """Where a chunk lies; its bytes are passed on beside it."""

    part: Extent
    lines_before: int  # lines of the part before the chunk
    ends_part: bool  # whether it is the empty chunk after the last bytes of the part


def read_chunks(parts: Sequence[Extent]) -> Iterator[tuple[SourceChunk, bytes]]:
    """Yield the chunks of several parts, and an empty one at each part's end.

    Memory is constant.

    Raises:
        UserError: a part cannot be read, is UTF-16 or UTF-32, or has a line without end.
    """
    for part in parts:
        lines = 0
        try:
            for data in _read_lines(part):
                if not lines:
                    data = data if part.start else data.removeprefix(codecs.BOM_UTF8)
                    refuse_wide_characters(data, part.path)
                yield SourceChunk(part, lines, ends_part=False), data
                lines += _count_lines(data)
        except (*DAMAGE_ERRORS, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the compressed data
            raise UserError(f"{part.path} is damaged: {error}; fetch it again") from error
        yield SourceChunk(part, lines, ends_part=True), b""


def _read_lines(part: Extent) -> Iterator[bytes]:
    """Yield blocks of whole lines; only the last may lack a line feed."""
    with open(part.path, "rb") as raw:
        raw.seek(part.start)
        file = decompress(part.path, raw)
        rest = part.end - part.start if file is raw else sys.maxsize  # bytes to read
        pending: list[bytes] = []  # blocks of a line whose end is not read yet
        while block := file.read(min(CHUNK_BYTES, rest)):
            rest -= len(block)
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                yield b"".join([*pending, head, newline])
                pending = []
            pending.append(tail)
            if sum(map(len, pending)) > _MAX_LINE_BYTES:
                raise UserError(
                    f"{part.path}: a line has more than {_MAX_LINE_BYTES >> 20} MiB; is this a "
                    "text file?"
                )
        if line := b"".join(pending):
            yield line


def refuse_wide_characters(data: bytes, name: str) -> None:
    """Refuse a file in UTF-16 or UTF-32 by its beginning; most of it would be valid UTF-8, too.

    In Latin script at least half of its bytes are NUL, in most other scripts they are control
    characters; in all scripts spaces and ends of lines contain NUL.

    Raises:
        UserError: names the file.
    """
    controls = len(data) - len(data.translate(None, _CONTROLS))
    if controls > len(data) * _MAX_CONTROL_SHARE:
        raise UserError(
            f"{name}: {controls:,} of its first {len(data):,} bytes are NUL or other control "
            "characters, as in UTF-16; save it as UTF-8 plain text"
        )


def _count_lines(data: bytes) -> int:
    r"""Count lines as Python reads them: ``\n``, ``\r\n`` and ``\r`` end one."""
    ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return ends + (data[-1:] not in (b"\n", b"\r", b""))
