"""Loads checkpoints safely: none of their code runs, and every error is one line.

torch loads only tensors and plain values from a checkpoint (``weights_only``). fairseq also writes
``argparse.Namespace`` and numpy's numbers, which are allowed here; a file that would run code is
still refused.
"""

import argparse
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_posenc.checkpoints.faults import describe_damage
from fairseq_posenc.checkpoints.trusted_settings import check_settings
from fairseq_posenc.errors import UserError

_PICKLE = b"\x80"  # first byte of a checkpoint of torch before 1.6, which is not an archive


def open_whole(path: Path) -> dict[str, Any]:
    """Load a checkpoint into memory: reading a mapped file that is overwritten ends the process.

    Errors keep their type, for callers that only try; others call :func:`open_checkpoint`.

    Raises:
        UserError: the file was written while it was read.
        Exception: the file is not a checkpoint, or would run code; the type depends on the file.
    """
    allow_safe_classes()
    before = path.stat()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    finally:  # also after an error, which a file written in part may cause
        after = path.stat()
        if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
            raise UserError("was written while it was read: try again")
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__} instead of a mapping")
    check_settings(state)
    return state


def refuse_incomplete(state: Mapping[str, object]) -> None:
    """Refuse a checkpoint without the entries that fairseq reads, such as weights alone."""
    has_history = "optimizer_history" in state or "best_loss" in state  # the latter if it is old
    if not isinstance(state.get("model"), dict) or not has_history:
        raise UserError("not a complete checkpoint of fairseq (it lacks a model, or its training)")
    if not state.get("cfg") and not state.get("args"):
        raise UserError("not a complete checkpoint of fairseq (it has no settings)")


def is_torn(path: Path) -> bool:
    """Check whether a file is empty, or no archive, as a checkpoint not written to its end.

    An archive cannot be opened without its table of contents, which is at the end. A file of torch
    before 1.6 is only checked for being empty.
    """
    with open(path, "rb") as file:
        return file.read(1) != _PICKLE and not zipfile.is_zipfile(file)


@contextmanager
def open_checkpoint(path: Path, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Open a checkpoint by :func:`open_whole`; blame it for any error in the ``with`` block, too.

    Args:
        path: the file.
        prefix: text before the path in messages, such as the option that named it.

    Raises:
        UserError: any error while the checkpoint is opened or read.
    """
    try:
        yield open_whole(path)
    except Exception as error:  # its type in torch and fairseq depends on the file
        label = f"{prefix} {path}".lstrip()
        raise UserError(f"{label}: {describe_damage(error)}") from error


def allow_safe_classes() -> None:
    """Let torch load ``argparse.Namespace``, and numpy's numbers, which metrics may be."""
    scalar: Any = np.float64(0).__reduce__()[0]  # numpy's function that unpickling calls
    # numpy 1 and 2 name its module differently.
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    types = [type(np.dtype(number)) for number in (np.float64, np.float32, np.int64)]
    torch.serialization.add_safe_globals([argparse.Namespace, np.dtype, *types, *names])
