"""Checks a data-bin's index and data before fairseq reads them.

fairseq maps both into memory and trusts the index: a wrong size or pointer causes a crash, a stack
trace, or tokens of another place. An audit hook sees every file that is opened, so no task and no
command is missed.
"""

import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fairseq_posenc.errors import UserError

_INDEX = ".idx"
_OPENING_MODULE = "fairseq.data.indexed_dataset"  # fairseq's module that opens data-bins
_DATA_OPENER = "_do_init"  # its function that opens the data, not only the index
# The first bytes of each format.
_MAPPED = b"MMIDIDX\0"
_LEGACY = b"TNTIDX\0\0"
_HUFFMAN = b"HUFFIDX\0"
_VERSION = 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8}  # by fairseq's code of their type
_BLOCK = 1 << 20  # sentences that are checked at a time
_checked: set[tuple[Path, tuple[tuple[int, int], ...]]] = set()  # with sizes and times of change


class _Files(NamedTuple):
    """The two files of a split: an index, and data beside it."""

    path: Path  # of the index
    index_size: int  # bytes
    data_size: int  # bytes

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the split."""
        raise UserError(f"{self.path} is damaged: {reason}; make the data-bin again")

    def check_index_size(self, expected: int, count: int) -> None:
        """Refuse an index whose size does not fit its number of sentences."""
        if self.index_size != expected:
            self.refuse(f"{self.index_size:,} bytes, not the {expected:,} of {count:,} sentences")

    def check_data_size(self, expected: int) -> None:
        """Refuse data whose size is not that of all sentences."""
        if self.data_size != expected:
            data = self.path.with_suffix(".bin").name
            self.refuse(f"{data} has {self.data_size:,} bytes, and its sentences have {expected:,}")


def ignore_unopened() -> None:
    """Suppress errors from datasets that were refused: fairseq closes files it never opened."""
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        module = getattr(unraisable.object, "__module__", None)
        if module != _OPENING_MODULE or not isinstance(unraisable.exc_value, AttributeError):
            previous(unraisable)

    sys.unraisablehook = hook


def check_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a damaged or empty split whose index fairseq opens for reading; an audit hook."""
    if event != "open":
        return
    path, mode, *_ = arguments
    if not str(path).endswith(_INDEX) or "w" in str(mode):
        return
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == _OPENING_MODULE:
        check_data_bin(Path(str(path)))
        # fairseq-preprocess reads the index of an empty split, but not its data.
        if caller.f_back is not None and caller.f_back.f_code.co_name == _DATA_OPENER:
            _refuse_empty(Path(str(path)))


def check_data_bin(index: Path) -> None:
    """Refuse a split whose index is damaged, or does not fit its data.

    An index is read once in a process, unless its files change.
    """
    data = index.with_suffix(".bin")
    for path in (index, data):
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is not a file; make the data-bin again")
    if not (index.exists() and data.exists()):
        return  # fairseq reports a missing split
    states = index.stat(), data.stat()
    key = index.resolve(), tuple((state.st_size, state.st_mtime_ns) for state in states)
    if key not in _checked:
        _check_format(_Files(index, index_size=states[0].st_size, data_size=states[1].st_size))
        _checked.add(key)


def _refuse_empty(index: Path) -> None:
    """Refuse a split without a sentence, which fairseq cannot open."""
    data = index.with_suffix(".bin")
    if data.is_file() and not data.stat().st_size:
        raise UserError(f"{data} is empty: the split has no sentences; make it of a longer text")


def _check_format(files: _Files) -> None:
    """Check an index by the format that its first bytes name; Huffman codes are not checked."""
    with open(files.path, "rb") as file:
        magic = file.read(8)
        if magic == _HUFFMAN:
            return
        if magic == _MAPPED:
            _check_mapped(files, file.read(18))
        elif magic == _LEGACY:
            _check_legacy(files, file.read(40))
        else:
            files.refuse("it does not start like an index of fairseq")


def _check_mapped(files: _Files, header: bytes) -> None:
    """Check the format ``mmap``, fairseq's default: sizes in tokens, and pointers in bytes."""
    # The header has 26 bytes: 9 of magic (8 were read before), version (8), type (1), count (8).
    if len(header) < 18 or header[0]:
        files.refuse("it was not written to its end")
    version, code, count = struct.unpack("<QBQ", header[1:])
    size = _check_header(files, version, code)
    files.check_index_size(26 + 12 * count, count)  # a size (4) and a pointer (8) per sentence
    sizes = _map(files.path, "<i4", 26, count)
    pointers = _map(files.path, "<i8", 26 + 4 * count, count)
    address = 0
    for start in range(0, count, _BLOCK):
        lengths = sizes[start : start + _BLOCK].astype(np.int64)
        _refuse_negative(files, lengths, start)
        ends = address + size * lengths.cumsum()
        begins = ends - size * lengths
        _refuse_other_pointers(files, pointers[start : start + _BLOCK], begins, start)
        address = int(ends[-1])
    files.check_data_size(address)


def _check_legacy(files: _Files, header: bytes) -> None:
    """Check the format of ``--dataset-impl`` lazy and cached: offsets in tokens, and sizes."""
    # The header has 48 bytes: magic, version, type, bytes of a token, count, number of sizes (8
    # each). Three tables follow: the index of each sentence's size and the offset of its tokens
    # (both count + 1), and the sizes.
    if len(header) < 40:
        files.refuse("it was not written to its end")
    version, code, size, count, dimensions = struct.unpack("<5Q", header)
    if size != _check_header(files, version, code):
        files.refuse(f"its tokens of type {code} have {size} bytes")
    files.check_index_size(48 + 8 * (2 * (count + 1) + dimensions), count)
    if count != dimensions:
        files.refuse(f"it has {count:,} sentences, and sizes of {dimensions:,}")
    offsets = _map(files.path, "<i8", 48 + 8 * (count + 1), count + 1).copy()
    lengths = _map(files.path, "<i8", 48 + 16 * (count + 1), count).copy()
    _refuse_negative(files, lengths, 0)
    _refuse_other_pointers(files, offsets[1:] - lengths, offsets[:-1], 0)
    if offsets[0] or (_map(files.path, "<i8", 48, count + 1) != np.arange(count + 1)).any():
        files.refuse("its sentences do not begin at the first token, or have several dimensions")
    files.check_data_size(size * int(offsets[-1]))


def _check_header(files: _Files, version: int, code: int) -> int:
    """Check the version and the type of tokens; return the bytes of a token."""
    if version != _VERSION:
        files.refuse(f"it is of version {version}, not {_VERSION}")
    if code not in _TOKEN_BYTES:
        files.refuse(f"its tokens are of type {code}, not an integer type")
    return _TOKEN_BYTES[code]


def _map(path: Path, dtype: str, offset: int, count: int) -> NDArray[np.int64]:
    """Map numbers of a file into memory."""
    if not count:
        return np.zeros(0, np.int64)  # numpy cannot map nothing
    return np.memmap(path, dtype, "r", offset, count)


def _refuse_negative(files: _Files, lengths: NDArray[np.int64], start: int) -> None:
    wrong = np.flatnonzero(lengths < 0)
    if len(wrong):
        files.refuse(f"sentence {start + wrong[0] + 1:,} has {lengths[wrong[0]]:,} tokens")


def _refuse_other_pointers(
    files: _Files, actual: NDArray[np.int64], expected: NDArray[np.int64], start: int
) -> None:
    """Refuse sentences that do not begin at the end of the sentence before."""
    wrong = np.flatnonzero(actual != expected)
    if len(wrong):
        files.refuse(
            f"sentence {start + wrong[0] + 1:,} begins at {actual[wrong[0]]:,}, not at "
            f"{expected[wrong[0]]:,}, where the one before it ends"
        )
