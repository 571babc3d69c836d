"""Checks a checkpoint's file before torch reads it: its size, its checksums and its pickles.

torch runs no code of a checkpoint, but calls known classes as its pickle says, so a few bytes can
allocate all memory. torch also ignores the checksums in the archive, so a byte that was damaged in
transit would change a weight.
"""

import io
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError

_MAX_PICKLE = 1 << 25  # bytes; a model of 1,000 tensors, with an optimizer's state, has 2^19
_BLOCK = 1 << 20  # bytes that are read at a time
# Classes that torch would call, and that allocate memory. No checkpoint of fairseq calls them: its
# tensors are built by functions of torch, from storages in the file.
_ALLOCATING = {"bytearray", "Counter", "Tensor", "UntypedStorage", "TypedStorage"}
_LEGACY_PICKLES = 5  # before torch 1.6: a mark, a version, sizes of numbers, contents, storages


def check_file(path: Path, checksums: bool) -> None:
    """Refuse a file that would fill the memory, or that differs from its checksums.

    Files of torch before 1.6, and those written with ``set_crc32_options(False)``, have none.

    Args:
        path: the checkpoint.
        checksums: whether to compare the checksums of weights, too, which reads the whole file
            (SECURITY.md measures it). False if only settings are needed.

    Raises:
        UserError: says what is wrong with the file, without naming it: that is left to the caller.
        Exception: the file is no checkpoint; the type depends on the file.
    """
    if not zipfile.is_zipfile(path):
        _check_legacy_pickles(path)
        return
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        size = path.stat().st_size
        # torch does not compress, so an honest archive never expands.
        if (inside := sum(part.file_size for part in parts)) > size:
            raise UserError(
                f"not a checkpoint of torch: its {size:,} bytes would expand to {inside:,}"
            )
        names = {part.filename.lower() for part in parts}  # torch ignores their case
        if len(names) < len(parts):
            raise UserError("not a checkpoint of torch: it has two parts of the same name")
        has_checksums = any(part.CRC for part in parts)
        contents: list[Any] = []
        # Pickles come first: they name the parameter of a damaged storage.
        for part in sorted(parts, key=_is_storage):
            if has_checksums and (checksums or not _is_storage(part)):
                _compare_checksum(archive, part, contents)
            if part.filename.lower().endswith(".pkl"):
                if part.file_size > _MAX_PICKLE:
                    raise UserError(
                        f"not a checkpoint of fairseq: its contents, without its weights, have "
                        f"{part.file_size:,} bytes"
                    )
                content = archive.read(part) if has_checksums else _read_unchecked(path, part)
                # No limit of sizes here: torch compares storages with the archive's parts.
                contents.append(_CheckingUnpickler(io.BytesIO(content), sys.maxsize).load())


def _is_storage(part: zipfile.ZipInfo) -> bool:
    """Check whether a part of an archive holds the numbers of a tensor: ``archive/data/0``."""
    return "/data/" in part.filename


def _compare_checksum(archive: zipfile.ZipFile, part: zipfile.ZipInfo, contents: list[Any]) -> None:
    """Read a part of an archive, and compare its checksum.

    Args:
        archive: the checkpoint.
        part: the part to read.
        contents: the pickles of the archive that were read, which name the parameters.

    Raises:
        UserError: the checksum differs; names the parameter if the part holds one.
    """
    try:
        with archive.open(part) as file:
            while file.read(_BLOCK):
                pass
    except zipfile.BadZipFile:
        key = part.filename.rpartition("/data/")[2]
        names = (name for root in contents for name in _name_tensors(root, key))
        raise UserError(
            f"the checkpoint is damaged: {next(names, f'its part {part.filename!a}')} does not "
            "match its checksum; copy the file again, or use another checkpoint"
        ) from None


def _name_tensors(root: Any, storage: str) -> Iterator[str]:
    """Yield the model's parameters whose numbers are in a storage.

    A tensor is pickled as a call with its storage as an argument, and a storage as the tuple
    ``("storage", type, key, device, length)``; see :meth:`_CheckingUnpickler.persistent_load`.
    """
    model = root.get("model") if isinstance(root, dict) else None
    for name, tensor in model.items() if isinstance(model, dict) else ():
        for part in tensor.arguments if isinstance(tensor, _StandIn) else ():
            if isinstance(part, _StandIn) and part.arguments[2:3] == (storage,):
                yield ascii(name)[1:-1]  # a name in the file may have control characters


def _read_unchecked(path: Path, part: zipfile.ZipInfo) -> bytes:
    """Read a part of an archive without checksums, which ``zipfile`` would take for damage."""
    with open(path, "rb") as file:
        # A local header ends with the lengths of name and extra field, then these two, then data.
        file.seek(part.header_offset + 26)
        name_length = int.from_bytes(file.read(2), "little")
        extra_length = int.from_bytes(file.read(2), "little")
        file.seek(name_length + extra_length, io.SEEK_CUR)
        return file.read(part.file_size)


def _check_legacy_pickles(path: Path) -> None:
    """Check the pickles at the beginning of a file of torch before 1.6."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        beginning = io.BytesIO(file.read(_MAX_PICKLE))
    for _ in range(_LEGACY_PICKLES):
        if beginning.tell() == size:
            break  # torch reports a file that ends early
        try:
            _CheckingUnpickler(beginning, size).load()
        except Exception as error:
            if beginning.tell() < _MAX_PICKLE:
                raise
            raise UserError("not a checkpoint of fairseq: its contents are too long") from error


class _StandIn(dict[Any, Any]):
    """Takes the place of any class or function in a pickle; keeps its arguments, does nothing.

    It is a dictionary because a state dict is pickled as a class to which items are then added. It
    has a hash because a pickle may use it as a key.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Refusing:
    """Takes the place of a class that allocates memory.

    A pickle may name it, as the type of a storage, but must not call it.
    """

    def __new__(cls, *arguments: Any) -> Any:
        raise UserError("it builds a buffer or a tensor without its numbers: no checkpoint does so")


def _encode(text: Any = "", encoding: Any = "latin1", *others: Any) -> bytes:
    """Take the place of ``_codecs.encode``: Python pickles bytes as a call of it, with latin1.

    Other encodings, such as ``hex``, double the text with each call.
    """
    if others or encoding != "latin1" or type(text) is not str:
        raise UserError("it encodes text in a way that no checkpoint does")
    return b""


class _CheckingUnpickler(pickle._Unpickler):
    """Reads a pickle as torch does, but replaces everything that torch would build or call.

    Its base is Python's unpickler in Python: the one in C allocates as many places as the largest
    number that a pickle gives to an object.
    """

    def __init__(self, file: io.BytesIO, file_size: int) -> None:
        super().__init__(file, encoding="latin1")
        self._file_size = file_size

    def load(self) -> Any:
        """Read one pickle.

        Raises:
            UserError: the file is not a pickle, or does what no checkpoint does.
            Exception: the pickle is broken; the type depends on it.
        """
        try:
            return super().load()
        except KeyError as error:  # an unknown operation
            raise UserError(
                "not a complete checkpoint of fairseq (its contents are not a pickle)"
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or function."""
        if (module, name) == ("_codecs", "encode"):
            return _encode
        is_tensor = module.startswith("torch") and name.endswith("Tensor")
        return _Refusing if is_tensor or name in _ALLOCATING else _StandIn

    def persistent_load(self, pid: Any) -> Any:
        """Replace a storage; ``pid`` is ``("storage", type, key, device, length)``."""
        length = pid[4] if isinstance(pid, tuple) and len(pid) > 4 else 0
        if type(length) is not int or not 0 <= length <= self._file_size:
            raise UserError("the checkpoint is damaged: it says that it is larger than its file")
        return _StandIn(*pid) if isinstance(pid, tuple) else _StandIn()
