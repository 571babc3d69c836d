"""Recovers ``checkpoint_last.pt`` if a training was killed while fairseq wrote it.

A checkpoint is *whole* if it can be loaded, and *torn* if its file ends too early.
"""

import logging
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.safe_loading import is_torn, open_whole
from fairseq_posenc.files import written_whole

logger = logging.getLogger(__name__)
LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
# File names that fairseq gives to checkpoints.
_NAMES = re.compile(r"checkpoint(\d+|_\d+_\d+|_last|_best|\.best_.+)\.pt")


class WholeCheckpoint(NamedTuple):
    """A checkpoint from which a training can be resumed; ``max`` of several is the newest."""

    updates: int  # number of updates made
    written: int  # modification time, in nanoseconds
    path: Path


def newest_checkpoint(folder: Path) -> WholeCheckpoint | None:
    """Find the newest whole checkpoint in the folder of a training, or None."""
    files = folder.iterdir() if folder.is_dir() else ()
    return max(filter(None, map(read_if_whole, files)), default=None)


def ensure_last_checkpoint(folder: Path) -> None:
    """Replace ``checkpoint_last.pt`` by the newest whole checkpoint if it is torn or missing."""
    last = folder / LAST
    if not last.exists() or is_torn(last):
        restore_last(last)


def restore_last(last: Path) -> bool:
    """Replace a torn or missing ``checkpoint_last.pt`` by the newest whole checkpoint beside it.

    Return False if its folder has no whole checkpoint.
    """
    newest = newest_checkpoint(last.parent)
    if newest is None:
        return False
    fault = "was not written to its end" if last.exists() else "is missing"
    with written_whole(last) as new:  # several processes may do this
        shutil.copyfile(newest.path, new)
    logger.warning(
        f"{last} {fault}; training resumes from {newest.path.name}, the newest complete "
        f"checkpoint (update {newest.updates:,})"
    )
    return True


def read_if_whole(path: Path) -> WholeCheckpoint | None:
    """Read a checkpoint's number of updates; None if no training can be resumed from the file."""
    if not _NAMES.fullmatch(path.name):
        return None
    try:  # loads the whole file, so a torn one fails here
        updates = int(open_whole(path)["optimizer_history"][-1]["num_updates"])
    except Exception:  # of any type, depending on the file
        return None
    return WholeCheckpoint(updates, path.stat().st_mtime_ns, path)
