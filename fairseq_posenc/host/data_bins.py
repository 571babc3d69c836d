"""Checks the lengths of a data-bin's files before fairseq maps them into memory.

fairseq trusts the index: a file that was not written to its end causes a crash, or wrong tokens.
Each model that is built with a task checks the task's data, before any are loaded.
"""

import struct
from pathlib import Path

from fairseq_posenc.errors import UserError

_HEADER = "<9sQBQ"  # of the format mmap, fairseq's default: magic, version, type, sentences
_MAGIC = b"MMIDIDX\0\0"
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8}  # by fairseq's code of their type


def check_data_bin(index: Path) -> None:
    """Refuse a split whose files do not have the lengths that its index says.

    Indices of formats other than fairseq's default are not checked.
    """
    data = index.with_suffix(".bin")
    for path in (index, data):
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is not a file; make the data-bin again")
    if not (index.exists() and data.exists()):
        return  # fairseq reports a missing split
    size = index.stat().st_size
    header_size = struct.calcsize(_HEADER)
    with open(index, "rb") as file:
        header = file.read(header_size)
        if not header.startswith(_MAGIC[:8]):
            return
        if len(header) < header_size:
            raise _damaged(index, "it was not written to its end")
        _, _, code, count = struct.unpack(_HEADER, header)
        expected = header_size + 12 * count  # a length of 4 bytes, and a place of 8
        if size != expected or code not in _TOKEN_BYTES:
            raise _damaged(index, f"{size:,} bytes, not the {expected:,} of {count:,} sentences")
        if not count:
            raise UserError(f"{data} is empty: the split has no sentences; make it of longer text")
        file.seek(header_size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(size - 8)
        (begin,) = struct.unpack("<q", file.read(8))
    end = begin + length * _TOKEN_BYTES[code]
    if data.stat().st_size != end:
        found = f"{data.name} has {data.stat().st_size:,} bytes, and its sentences have {end:,}"
        raise _damaged(index, found)


def _damaged(index: Path, reason: str) -> UserError:
    return UserError(f"{index} is damaged: {reason}; make the data-bin again")
