"""Lists the files of a corpus, and reads them as chunks of whole lines."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import READ_ERRORS, read_blocks

CHUNK_BYTES = 1 << 20  # about the size of a chunk, which ends with a line
# Control characters, without white space (0x09 to 0x0d), escape, and separators of records.
_CONTROLS = bytes([*range(0x00, 0x09), *range(0x0E, 0x1B)])
_MAX_CONTROL_SHARE = 0.03  # of the bytes of a text
_MAX_LINE_BYTES = 1 << 28  # a chunk is held in memory several times


class SourceFile(NamedTuple):
    """A file of a corpus, with the checksum that identifies its text wherever it is."""

    path: str
    sha256: str


class SourceChunk(NamedTuple):
    """The place of a chunk; :func:`read_chunks` yields its bytes with it."""

    file: SourceFile
    lines_before: int  # lines of the file before the chunk
    ends_file: bool  # whether it is the empty chunk after the last bytes of the file


def read_source(path: str) -> SourceFile:
    """Compute the checksum of a file."""
    return SourceFile(path, checksum(Path(path)))


def combine_checksums(files: Sequence[SourceFile]) -> str:
    """Combine the checksums of several files to one."""
    return hashlib.sha256(" ".join(file.sha256 for file in files).encode()).hexdigest()


def find_files(inputs: Sequence[str], out: Path) -> list[str]:
    """List the input files that are not empty; for a folder all files below it, sorted by path.

    Hidden files and folders, in which download programs keep their records, are left out.

    Raises:
        UserError: a path is neither a file nor a folder, all files are empty, one occurs twice, or
            the folder ``out`` is to be made among them.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if name and path.is_dir():  # pathlib takes "" for the current folder
            if out.resolve().is_relative_to(path.resolve()):
                raise UserError(f"--out {out}: lies in {name}, whose files are all read; move it")
            below: list[Path] = []
            for folder, folders, names in os.walk(path, onerror=_raise):
                folders[:] = [x for x in folders if x[0] != "."]  # in place: it goes on to these
                below += [Path(folder, x) for x in names if x[0] != "."]
            files += sorted(str(file) for file in below if file.is_file())
        elif path.is_file():
            files.append(name)
        else:
            why = "is not a file or folder" if path.exists() else "does not exist"
            raise UserError(f"{name or repr(name)} {why}; give local files or folders")
    files = [name for name in files if os.path.getsize(name)]
    if not files:
        raise UserError(f"no text in {', '.join(inputs)}; name files or folders with text")
    known: dict[str, str] = {}
    for name in files:
        if (place := os.path.realpath(name)) in known:  # links may lead to one file
            raise UserError(f"{name}: is {known[place]} again; name each file once, no links")
        known[place] = name
    return files


def _raise(error: OSError) -> NoReturn:
    """Raise the error of a folder that cannot be read, which a walk would leave out."""
    raise error


def read_chunks(files: Iterable[SourceFile]) -> Iterator[tuple[SourceChunk, bytes]]:
    """Yield the chunks of several files in constant memory; an empty chunk ends each file.

    Raises:
        UserError: a file is damaged, is UTF-16 or UTF-32, or has a line without end.
    """
    for file in files:
        lines = 0
        try:
            for data in _read_lines(file.path):
                if not lines:  # the first chunk
                    data = data.removeprefix(codecs.BOM_UTF8)
                    refuse_wide_characters(data, file.path)
                yield SourceChunk(file, lines, ends_file=False), data
                lines += _count_lines(data)
        except READ_ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the compressed data
            raise UserError(f"{file.path} is damaged: {error}; fetch it again") from error
        yield SourceChunk(file, lines, ends_file=True), b""


def _read_lines(path: str) -> Iterator[bytes]:
    """Yield blocks of whole lines; only the last may lack a line feed."""
    pending: list[bytes] = []  # blocks of a line whose end is not read yet
    for block in read_blocks(path, CHUNK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head, newline])
            pending = []
        pending.append(tail)
        if sum(map(len, pending)) > _MAX_LINE_BYTES:
            raise UserError(
                f"{path}: a line has more than {_MAX_LINE_BYTES >> 20} MiB; is this a text file?"
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
