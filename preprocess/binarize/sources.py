"""Reads parts of files as chunks of whole lines: a :class:`Chunk` and its decompressed bytes."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import DAMAGE_ERRORS, decompress

from .shards import Input, Part

CHUNK_BYTES = 1 << 20
# Control characters, without white space (0x09 to 0x0d), escape, and separators of records.
_CONTROLS = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B)])
_MAX_CONTROL_SHARE = 0.03  # of the bytes of a text
_MAX_LINE_BYTES = 1 << 28  # a chunk is held in memory several times


class Chunk(NamedTuple):
    """Where a chunk lies; its bytes are passed on beside it."""

    part: int  # number of the part
    end_line: int  # lines of the part up to the end of the chunk
    lines: int  # number of lines
    ends_part: bool  # whether it is the empty chunk after the last bytes of a part


class _EndlessLineError(Exception):
    """A line is too long to be held in memory."""


def read_chunks(inputs: Sequence[Input], first: int = 0) -> Iterator[tuple[Chunk, bytes]]:
    """Yield the chunks of several parts from ``first`` on, and an empty one at each part's end.

    Memory is constant.

    Raises:
        UserError: a part cannot be read, is UTF-16 or UTF-32, has a line without end, or has
            changed.
    """
    for number in range(first, len(inputs)):
        yield from _read_part(inputs[number], number)


def _read_part(entry: Input, number: int) -> Iterator[tuple[Chunk, bytes]]:
    """Yield the chunks of a part, and the empty one at its end."""
    path, start, _ = entry.part
    hashed = _HashedPart(entry.part)
    end_line = 0
    is_begin = True
    try:
        with io.BufferedReader(hashed, CHUNK_BYTES) as raw:
            for data in _split(decompress(path, raw)):
                if is_begin:
                    data = data if start else data.removeprefix(codecs.BOM_UTF8)
                    refuse_wide_characters(data, path)
                    is_begin = False
                lines = count_lines(data)
                end_line += lines
                yield Chunk(number, end_line, lines, ends_part=False), data
            # Bytes after compressed content count for the checksum.
            while raw.read(CHUNK_BYTES):
                continue
    except (*DAMAGE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the compressed data
        raise UserError(f"{path} is damaged: {error}; fetch it again") from error
    except _EndlessLineError:
        raise UserError(
            f"{path}, line {end_line + 1}: more than {_MAX_LINE_BYTES >> 20} MiB without an end "
            "of line; is this a text file?"
        ) from None
    if entry.sha256 not in ("", hashed.digest.hexdigest()):
        raise UserError(f"{path} changed while it was read; start again from nothing")
    yield Chunk(number, end_line, lines=0, ends_part=True), b""


def _split(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in blocks of whole lines; only the last may lack a line feed."""
    pending: list[bytes] = []  # blocks of a line whose end is not read yet
    pending_size = 0
    while block := file.read(CHUNK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head, newline])
            pending = []
            pending_size = 0
        pending.append(tail)
        pending_size += len(tail)
        if pending_size > _MAX_LINE_BYTES:
            raise _EndlessLineError
    if pending_size:
        yield b"".join(pending)


class _HashedPart(io.RawIOBase):
    """A part of a file, opened as a file, whose SHA-256 is computed while it is read."""

    def __init__(self, part: Part) -> None:
        self._file = open(part.path, "rb")  # noqa: SIM115  (closed with this object)
        self._file.seek(part.start)
        self._remaining = part.end - part.start
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self._file.read(min(len(view), self._remaining))
        view[: len(data)] = data
        self._remaining -= len(data)
        self.digest.update(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


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


def count_lines(data: bytes) -> int:
    r"""Count lines as Python reads them: ``\n``, ``\r\n`` and ``\r`` end one."""
    ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return ends + (data[-1:] not in (b"\n", b"\r", b""))
