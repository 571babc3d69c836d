"""Lists the parts of files that a shard has, and reads them as chunks of whole lines."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import DAMAGE_ERRORS, OPENERS, read_blocks

CHUNK_BYTES = 1 << 20
# Control characters, without white space (0x09 to 0x0d), escape, and separators of records.
_CONTROLS = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B)])
_MAX_CONTROL_SHARE = 0.03  # of the bytes of a text
_MAX_LINE_BYTES = 1 << 28  # a chunk is held in memory several times


class Extent(NamedTuple):
    """Whole lines of a file, from byte ``start`` to ``end``; compressed files are never divided."""

    path: str
    start: int
    end: int
    sha256: str = ""  # checksum of the bytes, once it is computed

    def with_checksum(self) -> Extent:
        """Compute the checksum, which identifies the text wherever the file is."""
        return self._replace(sha256=checksum(Path(self.path), self.start, self.end))


class SourceChunk(NamedTuple):
    """Where a chunk lies; its bytes are passed on beside it."""

    part: Extent
    lines_before: int  # lines of the part before the chunk
    ends_part: bool  # whether it is the empty chunk after the last bytes of the part


def combine_checksums(parts: Sequence[Extent]) -> str:
    """Combine the checksums of several parts to one."""
    return hashlib.sha256(" ".join(part.sha256 for part in parts).encode()).hexdigest()


def find_files(inputs: Sequence[str]) -> list[str]:
    """List the input files; for a folder all files below it, sorted by path.

    Hidden files and folders, in which download programs keep their records, are left out.

    Raises:
        UserError: a path is missing, or all files are empty.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            below = [file for file in path.rglob("*") if file.is_file()]
            files += sorted(
                str(file) for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"
            )
        elif path.is_file():
            files.append(name)
        else:
            raise UserError(f"{name} is not there; give local files or directories")
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"no text in {', '.join(inputs)}")
    return files


def parts_of_shard(files: Sequence[str], shard: int = 0, num_shards: int = 1) -> list[Extent]:
    """List the parts of a shard, in order; by default those of the whole text.

    Shards have about the same number of bytes, or of files, if all files are compressed.

    Raises:
        UserError: the shard would be empty.
    """
    compressed = {path for path in files if Path(path).suffix in OPENERS}
    if len(compressed) < len(set(files)):
        weights = list(map(os.path.getsize, files))
    else:
        weights = [1] * len(files)
    # The shard has the weight from `begin` to `end`, and the compressed files that begin there.
    begin = sum(weights) * shard // num_shards
    end = sum(weights) * (shard + 1) // num_shards
    parts = []
    file_begin = 0  # weight of the files before this one
    for path, weight in zip(files, weights):
        if path in compressed:
            is_ours = begin <= file_begin < end
            part = Extent(path, 0, os.path.getsize(path) if is_ours else 0)
        else:
            offsets = (begin - file_begin, end - file_begin)
            start, stop = (_find_line_start(path, offset, weight) for offset in offsets)
            part = Extent(path, start, stop)
        if part.start < part.end:
            parts.append(part)
        file_begin += weight
    if not parts:
        raise UserError(
            f"shard {shard} of {num_shards} would be empty: lines and compressed files are not "
            "divided; use fewer shards"
        )
    return parts


def _find_line_start(path: str, offset: int, size: int) -> int:
    """Find the beginning of the first line at or after an offset, which may be out of the file."""
    if not 0 < offset < size:  # without opening it: of many files for many shards it takes hours
        return min(max(offset, 0), size)
    with open(path, "rb") as file:
        file.seek(offset - 1)
        while (line := file.readline(CHUNK_BYTES)) and not line.endswith(b"\n"):
            continue
        return file.tell()


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
    pending: list[bytes] = []  # blocks of a line whose end is not read yet
    for block in read_blocks(part.path, CHUNK_BYTES, part.start, part.end):
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head, newline])
            pending = []
        pending.append(tail)
        if sum(map(len, pending)) > _MAX_LINE_BYTES:
            raise UserError(
                f"{part.path}: a line has more than {_MAX_LINE_BYTES >> 20} MiB; is this a text "
                "file?"
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
