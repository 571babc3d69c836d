"""Reads parts of files as chunks of whole lines: a :class:`Chunk` and its decompressed bytes."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import DAMAGE_ERRORS, decompress

from .shards import Input, Part

CHUNK_BYTES = 1 << 20
# Control characters, without white space (0x09 to 0x0d), escape, and separators of records.
_CONTROLS = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B)])
_MAX_CONTROL_SHARE = 0.03  # of the bytes of a text
_MAX_LINE_BYTES = 1 << 28  # a chunk is held in memory several times


class Place(NamedTuple):
    """A place in the text of several parts."""

    part: int = 0  # number of the part
    offset: int = 0  # decompressed bytes of the part before the place
    line: int = 0  # lines of the part before the place


class Chunk(NamedTuple):
    """Where a chunk lies; its bytes are passed on beside it."""

    end: Place
    lines: int  # number of lines
    ends_part: bool  # whether it is the empty chunk after the last bytes of a part

    @property
    def next_place(self) -> Place:
        """The beginning of the next chunk."""
        return Place(self.end.part + 1) if self.ends_part else self.end


class _EndlessLineError(Exception):
    """A line is too long to be held in memory."""


def read_chunks(inputs: Sequence[Input], place: Place) -> Iterator[tuple[Chunk, bytes]]:
    """Yield the chunks of several parts from a place on, and an empty one at the end of each part.

    Memory is constant.

    Raises:
        UserError: a part cannot be read, is UTF-16 or UTF-32, has a line without end, or has
            changed.
    """
    for number in range(place.part, len(inputs)):
        yield from _read_part(inputs[number], place)
        place = Place(number + 1)


def _read_part(entry: Input, place: Place) -> Iterator[tuple[Chunk, bytes]]:
    """Yield the chunks of a part from a place in it on, and the empty one at its end."""
    path, start, _ = entry.part
    hashed = _HashedPart(entry.part)
    try:
        with io.BufferedReader(hashed, CHUNK_BYTES) as raw:
            file = decompress(path, raw)
            to_skip = place.offset
            while to_skip and (data := file.read(min(to_skip, CHUNK_BYTES))):
                to_skip -= len(data)
            for data in _split(file):
                size = len(data)
                if start + place.offset == 0:  # the beginning of the file
                    data = data.removeprefix(codecs.BOM_UTF8)
                if place.offset == 0:  # the beginning of the part, also for a run that resumes
                    refuse_wide_characters(data, path)
                lines = count_lines(data)
                place = Place(place.part, place.offset + size, place.line + lines)
                yield Chunk(place, lines, ends_part=False), data
            # Bytes after compressed content count for the checksum.
            while raw.read(CHUNK_BYTES):
                continue
    except (*DAMAGE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the compressed data
        raise UserError(f"{path} is damaged: {error}; fetch it again") from error
    except _EndlessLineError:
        raise UserError(
            f"{path}, line {place.line + 1}: more than {_MAX_LINE_BYTES >> 20} MiB without an end "
            "of line; is this a text file?"
        ) from None
    if entry.sha256 not in ("", hashed.digest.hexdigest()):
        raise UserError(f"{path} changed while it was read; start again from nothing")
    yield Chunk(place, lines=0, ends_part=True), b""


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
