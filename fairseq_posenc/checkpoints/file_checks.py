"""A checkpoint's file, checked before torch reads it: its size, its checksums and its pickles.

torch runs no code of a checkpoint, but does what its pickle says with the classes that it knows: a
few bytes can ask for as much memory as they like. And it ignores the checksums in the archive that
it writes, so that a byte that was changed on its way would become another weight.
"""

import io
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from fairseq_posenc.errors import UserError

_LARGEST_PICKLE = 1 << 25  # bytes; a model of 1,000 tensors, with an optimizer's state, has 2^19
_BLOCK = 1 << 20  # bytes that are read at a time
# torch calls these, and no checkpoint of fairseq has them. Tensors and storages of a checkpoint
# are built by functions of torch's, which take what is in the file.
_HUNGRY = {"bytearray", "Counter", "Tensor", "UntypedStorage", "TypedStorage"}
_LEGACY_PICKLES = 5  # before torch 1.6: a mark, a version, sizes of numbers, contents, storages
_IN_MODEL = "model"


def check_file(path: Path, checksums: bool) -> None:
    """Refuse a file that would fill the memory, or that is not as it was written.

    The checksums of everything but weights are always compared. Those of the weights need all of
    the file to be read (SECURITY.md measures it). So they are compared where weights are loaded,
    and not where a command looks for settings or the newest file. A file of torch before 1.6, and
    one written with ``set_crc32_options(False)``, has no checksums.

    Raises:
        UserError: says what is wrong.
        Exception: no checkpoint; the type depends on the file.
    """
    if not zipfile.is_zipfile(path):
        _try_legacy_pickles(path)
        return
    with zipfile.ZipFile(path) as archive:
        parts, size = archive.infolist(), path.stat().st_size
        if (inside := sum(part.file_size for part in parts)) > size:  # torch compresses nothing
            raise UserError(
                f"not a checkpoint of torch: its {size:,} bytes would expand to {inside:,}"
            )
        names = {part.filename.lower() for part in parts}  # torch ignores their case
        if len(names) < len(parts):
            raise UserError("not a checkpoint of torch: it has two parts of the same name")
        has_checksums = any(part.CRC for part in parts)
        contents: list[Any] = []
        for part in sorted(parts, key=_is_storage):
            if has_checksums and (checksums or not _is_storage(part)):
                _compare_checksum(archive, part, contents)
            if part.filename.endswith(".pkl"):
                if part.file_size > _LARGEST_PICKLE:
                    raise UserError(
                        f"not a checkpoint of fairseq: its contents, without its weights, have "
                        f"{part.file_size:,} bytes"
                    )
                file = io.BytesIO(archive.read(part) if has_checksums else _read(path, part))
                contents.append(_Trial(file, sys.maxsize).load())


def _is_storage(part: zipfile.ZipInfo) -> bool:
    """Check whether a part of an archive holds the numbers of tensors, as ``archive/data/0``."""
    return "/data/" in part.filename


def _compare_checksum(archive: zipfile.ZipFile, part: zipfile.ZipInfo, contents: list[Any]) -> None:
    """Read a part of an archive, and compare its checksum.

    Raises:
        UserError: it is another one; names the parameter whose numbers these are.
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
    """Yield the model's parameters whose numbers are in a storage."""
    model = root.get(_IN_MODEL) if isinstance(root, dict) else None
    for name, tensor in model.items() if isinstance(model, dict) else ():
        for held in tensor.given if isinstance(tensor, _Stand) else ():
            if isinstance(held, _Stand) and held.given[2:3] == (storage,):
                yield ascii(name)[1:-1]


def _read(path: Path, part: zipfile.ZipInfo) -> bytes:
    """Read a part of an archive without checksums, which torch does not compress."""
    with open(path, "rb") as file:
        file.seek(part.header_offset + 26)  # where the sizes of its name and its extra field are
        sizes = file.read(4)
        skipped = int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
        file.seek(skipped, io.SEEK_CUR)
        return file.read(part.file_size)


def _try_legacy_pickles(path: Path) -> None:
    """Try the pickles at the beginning of a file of torch before 1.6."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = io.BytesIO(file.read(_LARGEST_PICKLE))
    for _ in range(_LEGACY_PICKLES):
        if start.tell() == len(start.getbuffer()):
            break
        _Trial(start, size).load()
    if start.tell() == _LARGEST_PICKLE:
        raise UserError("not a checkpoint of fairseq: its contents are too long")


class _Stand(dict[Any, Any]):
    """Stands in a trial for whatever a pickle builds, and does nothing."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.given = given

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Hungry:
    """Replaces, in a trial, a class that allocates as much memory as the file asks for.

    A pickle may name it, as the type of a storage, but not build it.
    """

    def __new__(cls, *given: Any) -> Any:
        raise UserError("it builds a buffer or a tensor without its numbers: no checkpoint does so")


def _encode(text: Any = "", encoding: Any = "latin1", *others: Any) -> bytes:
    """Stand in for ``_codecs.encode``, by which Python pickles bytes, and with one encoding only.

    Others make text longer each time, ``hex`` twice as long.
    """
    if others or encoding != "latin1" or type(text) is not str:
        raise UserError("it encodes text in a way that no checkpoint does")
    return b""


class _Trial(pickle._Unpickler):  # Python's own, in Python
    """Reads a pickle as torch does, with stand-ins for all that torch would build or call."""

    def __init__(self, file: io.BytesIO, file_size: int) -> None:
        super().__init__(file, encoding="latin1")
        self._file = file
        self._file_size = file_size

    def load(self) -> Any:
        """Read one pickle.

        Raises:
            UserError: it is not a pickle, or asks for what no checkpoint does.
            Exception: a broken pickle; the type depends on it.
        """
        try:
            return super().load()
        except KeyError as error:  # an unknown operation
            raise UserError(
                "not a whole checkpoint of fairseq (its contents are not a pickle)"
            ) from error

    def _skip_protocol(self) -> None:
        self._file.read(1)  # torch reads all protocols as 2
        self.proto = 2

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.PROTO[0]: _skip_protocol,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function."""
        if (module, name) == ("_codecs", "encode"):
            return _encode
        hungry = name in _HUNGRY or (module.startswith("torch") and name.endswith("Tensor"))
        return _Hungry if hungry else _Stand

    def persistent_load(self, pid: Any) -> Any:
        """Return the stand-in for a storage: a mark, its type, its key, its device, its length."""
        length = pid[4] if isinstance(pid, tuple) and len(pid) > 4 else 0
        if type(length) is not int or not 0 <= length <= self._file_size:
            raise UserError("the checkpoint is damaged: it says that it is larger than its file")
        return _Stand(*pid) if isinstance(pid, tuple) else _Stand()
