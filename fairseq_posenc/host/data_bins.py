"""Checks a data-bin's index and data before fairseq reads them.

fairseq maps both into memory and trusts the index: a wrong size or pointer causes a crash, a stack
trace, or wrong tokens. An audit hook sees every file that is opened, so no task and no command is
missed.

A data-bin has an index (``.idx``) and data (``.bin``) for each split. The data are the tokens of
all sentences, one after the other; the index has the size and the place of each sentence.
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
_MAPPED_HEADER = 26  # bytes: magic (9, one more than above), version (8), type (1), count (8)
_LEGACY_HEADER = 48  # bytes: magic, version, type, bytes of a token, count, count of sizes (8 each)
_VERSION = 1  # of both formats
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8}  # by fairseq's code of their type
_BLOCK = 1 << 20  # sentences that are checked at a time, so that little memory is needed
# The indices that passed; each with the size and the time of change of its two files.
_checked: set[tuple[Path, tuple[tuple[int, int], ...]]] = set()


class _Files(NamedTuple):
    """The two files of a split: an index, and data beside it."""

    path: Path  # the index
    index_size: int  # in bytes
    data_size: int  # in bytes

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


def install_unraisable_hook() -> None:
    """Suppress the errors that follow from a refused split: fairseq closes files it never opened.

    Its datasets do so in ``__del__``, whose errors Python passes to ``sys.unraisablehook``.
    """
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        module = getattr(unraisable.object, "__module__", None)
        if module != _OPENING_MODULE or not isinstance(unraisable.exc_value, AttributeError):
            previous(unraisable)

    sys.unraisablehook = hook


def check_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a damaged or empty split when fairseq opens its index to read it, as an audit hook."""
    if event != "open":
        return
    path, mode, *_ = arguments
    if not str(path).endswith(_INDEX) or "w" in str(mode):
        return
    caller = sys._getframe(1)  # an audit hook's caller is the code that opens the file
    if caller.f_globals.get("__name__") == _OPENING_MODULE:
        check_data_bin(Path(str(path)))
        # fairseq-preprocess reads the index of an empty split, but not its data.
        if caller.f_back is not None and caller.f_back.f_code.co_name == _DATA_OPENER:
            _refuse_empty(Path(str(path)))


def check_data_bin(index: Path) -> None:
    """Refuse a split whose index is damaged, or does not fit its data.

    A process checks a split once, and again only if its files change.
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
    """Refuse a split without a sentence, whose data fairseq cannot map into memory."""
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
            _check_mapped(files, file.read(_MAPPED_HEADER - len(magic)))
        elif magic == _LEGACY:
            _check_legacy(files, file.read(_LEGACY_HEADER - len(magic)))
        else:
            files.refuse("it does not start like an index of fairseq")


def _check_mapped(files: _Files, header: bytes) -> None:
    """Check the format ``mmap``, fairseq's default, from its header without the first 8 bytes.

    Two tables follow the header: the length of each sentence in tokens, and where it begins in the
    data, in bytes.
    """
    if len(header) < _MAPPED_HEADER - 8 or header[0]:  # the ninth byte of magic is 0
        files.refuse("it was not written to its end")
    version, code, count = struct.unpack("<QBQ", header[1:])
    token_bytes = _check_header(files, version, code)
    begins_at = _MAPPED_HEADER + 4 * count  # after the lengths, of 4 bytes each
    files.check_index_size(begins_at + 8 * count, count)
    all_lengths = _map(files.path, "<i4", _MAPPED_HEADER, count)
    all_begins = _map(files.path, "<i8", begins_at, count)
    end = 0
    for start in range(0, count, _BLOCK):
        lengths = all_lengths[start : start + _BLOCK].astype(np.int64)
        _refuse_negative(files, lengths, start)
        ends = end + token_bytes * lengths.cumsum()
        expected = ends - token_bytes * lengths
        _refuse_other_begins(files, all_begins[start : start + _BLOCK], expected, start)
        end = int(ends[-1])
    files.check_data_size(end)


def _check_legacy(files: _Files, header: bytes) -> None:
    """Check the format of ``--dataset-impl`` lazy and cached, from its header without the magic.

    Three tables of numbers of 8 bytes follow the header: the row of each sentence in the third
    table, where it begins in the data, in tokens (both with one number more, for the end), and the
    length of each sentence.
    """
    if len(header) < _LEGACY_HEADER - 8:
        files.refuse("it was not written to its end")
    version, code, token_bytes, count, sizes = struct.unpack("<5Q", header)
    if token_bytes != _check_header(files, version, code):
        files.refuse(f"its tokens of type {code} have {token_bytes} bytes")
    begins_at = _LEGACY_HEADER + 8 * (count + 1)
    lengths_at = begins_at + 8 * (count + 1)
    files.check_index_size(lengths_at + 8 * sizes, count)
    if count != sizes:
        files.refuse(f"it has {count:,} sentences, and sizes of {sizes:,}")
    rows = _map(files.path, "<i8", _LEGACY_HEADER, count + 1)
    begins = _map(files.path, "<i8", begins_at, count + 1)
    lengths = _map(files.path, "<i8", lengths_at, count)
    _refuse_negative(files, lengths, 0)
    _refuse_other_begins(files, begins[1:] - lengths, begins[:-1], 0)
    if begins[0] or (rows != np.arange(count + 1)).any():
        files.refuse("its sentences do not begin at the first token, or have several dimensions")
    files.check_data_size(token_bytes * int(begins[-1]))


def _check_header(files: _Files, version: int, code: int) -> int:
    """Check the version and the type of tokens; return the bytes of a token."""
    if version != _VERSION:
        files.refuse(f"it is of version {version}, not {_VERSION}")
    if code not in _TOKEN_BYTES:
        files.refuse(f"its tokens are of type {code}, not an integer type")
    return _TOKEN_BYTES[code]


def _map(path: Path, dtype: str, offset: int, count: int) -> NDArray[np.int64]:
    """Map ``count`` numbers of a file into memory, from byte ``offset`` on."""
    if not count:
        return np.zeros(0, np.int64)  # numpy cannot map nothing
    return np.memmap(path, dtype, "r", offset, count)


def _refuse_negative(files: _Files, lengths: NDArray[np.int64], start: int) -> None:
    """Refuse a negative length; the first of ``lengths`` is that of sentence ``start``."""
    wrong = np.flatnonzero(lengths < 0)
    if len(wrong):
        files.refuse(f"sentence {start + wrong[0] + 1:,} has {lengths[wrong[0]]:,} tokens")


def _refuse_other_begins(
    files: _Files, actual: NDArray[np.int64], expected: NDArray[np.int64], start: int
) -> None:
    """Refuse sentences that do not begin where the previous one ends; the first is ``start``."""
    wrong = np.flatnonzero(actual != expected)
    if len(wrong):
        files.refuse(
            f"sentence {start + wrong[0] + 1:,} begins at {actual[wrong[0]]:,}, not at "
            f"{expected[wrong[0]]:,}, where the one before it ends"
        )
