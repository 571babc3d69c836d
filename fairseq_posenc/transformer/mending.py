"""A ``checkpoint_last.pt`` that was being copied when its training was killed."""

from __future__ import annotations

import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)
LAST = "checkpoint_last.pt"
_TWINS = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")  # what fairseq calls them
_PICKLE = b"\x80"  # how a checkpoint of torch before 1.6 begins, which is no archive


class _Twin(NamedTuple):
    updates: int
    written: int
    path: Path


def is_torn(path: Path) -> bool:
    """Return whether a file is the beginning of a checkpoint only, or nothing at all.

    The table of an archive's contents is at its end.
    """
    with open(path, "rb") as file:
        return not file.read(1).startswith(_PICKLE) and not zipfile.is_zipfile(file)


def mend(last: Path) -> None:
    """Put the newest whole checkpoint of a folder in the place of a torn last one.

    Raises:
        UserError: there is none.
    """
    twins = [twin for twin in map(_read, last.parent.iterdir()) if twin]
    if not twins:
        raise UserError(
            f"{last} was not written to its end, and no whole checkpoint of the training lies "
            "beside it: remove it to start from the beginning"
        )
    newest = max(twins)
    # Other processes may be at the same: each has a name of its own until the file is whole.
    temporary = last.with_name(f"{last.name}.{os.getpid()}.new")
    try:
        shutil.copyfile(newest.path, temporary)
        os.replace(temporary, last)
    finally:
        temporary.unlink(missing_ok=True)
    logger.warning(
        f"{last} was not written to its end; the training goes on from {newest.path.name}, "
        f"the newest whole checkpoint, of update {newest.updates:,}"
    )


def _read(path: Path) -> _Twin | None:
    """Return what a checkpoint is of, None if it is none that a training can go on from."""
    if not _TWINS.fullmatch(path.name):
        return None
    try:  # mapped into memory: only the settings are read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        updates = int(state["optimizer_history"][-1]["num_updates"])
    except Exception:  # whatever it is, the training cannot go on from it
        return None
    return _Twin(updates, path.stat().st_mtime_ns, path)
