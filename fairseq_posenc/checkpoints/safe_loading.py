"""Safe loading of checkpoints: no code of theirs runs, and every error is one line.

torch reads only tensors and plain settings from a checkpoint (``weights_only``), and fairseq writes
``argparse.Namespace`` into it. Allowing that one class makes every command work while a file that
would run code is still refused.
"""

import argparse
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_posenc.checkpoints.error_messages import describe_damage
from fairseq_posenc.checkpoints.trusted_settings import check_settings
from fairseq_posenc.errors import UserError

_PICKLE = b"\x80"  # how a checkpoint of torch before 1.6 begins, which is not an archive


def open_mapped(path: Path) -> dict[str, Any]:
    """Load a checkpoint with its tensors mapped into memory: they are read when they are used.

    Raises:
        Exception: no checkpoint, or one that would run code; the type depends on the file.
    """
    refuse_oversized_archive(path)
    mapped = zipfile.is_zipfile(path)  # not before torch 1.6
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__} in the place of a mapping")
    _refuse_expanded_tensors(state)
    check_settings(state)
    return state


def is_torn(path: Path) -> bool:
    """Check whether a file is empty, or a checkpoint that was not written to its end.

    The table of an archive's contents is at its end.
    """
    with open(path, "rb") as file:
        return file.read(1) != _PICKLE and not zipfile.is_zipfile(file)


def _refuse_expanded_tensors(state: Any) -> None:
    """Refuse tensors that claim more numbers than are stored for them.

    With a stride of 0 a file of a few bytes has as many as it likes, and all that is done with them
    takes as long as if they were there. No training writes such tensors.
    """
    left, seen = [("", state)], set()
    while left:
        name, thing = left.pop()
        if isinstance(thing, torch.Tensor):
            stored = thing.untyped_storage().nbytes() // thing.element_size()
            if thing.numel() > stored:
                raise UserError(
                    f"the checkpoint is damaged: {name or 'a tensor'} says that it has "
                    f"{thing.numel():,} numbers, and {stored:,} are stored"
                )
        elif isinstance(thing, (dict, list, tuple)) and id(thing) not in seen:
            seen.add(id(thing))
            parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
            left += [(f"{name}.{key}".lstrip("."), part) for key, part in parts]


def refuse_oversized_archive(path: Path) -> None:
    """Refuse an archive that claims to hold more than its length: torch compresses nothing.

    Raises:
        UserError: so many bytes would have filled the memory before anything else could be checked.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        inside = sum(part.file_size for part in archive.infolist())
    if inside > path.stat().st_size:
        raise UserError(
            f"not a checkpoint of torch: its {path.stat().st_size:,} bytes would become {inside:,}"
        )


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Convert every error of reading a checkpoint, as in ``--checkpoint PATH``, to one line.

    Raises:
        UserError: whatever went wrong; what torch and fairseq raise depends on what the file holds.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {describe_damage(error)}") from error


def allow_safe_classes() -> None:
    """Let torch load what fairseq's files hold beside tensors and settings.

    That is ``argparse.Namespace``, and numpy's numbers, which scikit-learn's metrics are.
    """
    if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4
        scalar: Any = np.float64(0).__reduce__()[0]  # its module has another name in numpy 1
        number = type(np.dtype(np.float64))
        torch.serialization.add_safe_globals([argparse.Namespace, scalar, np.dtype, number])
