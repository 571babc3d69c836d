"""Deletes multiprocessing's temporary folders, even those of programs that were killed."""

import os
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

from fairseq_posenc.files import delete_abandoned, lock_if_possible

_ALIVE = "fairseq-posenc-is-alive"


def share_temporary_folder() -> None:
    """Make all processes of this program share one temporary folder of multiprocessing, ``pymp-*``.

    By default every process has its own, and the workers of data loaders, which are killed, leave
    theirs behind. The first process deletes the shared folder when it ends; if it is killed, the
    next program does.
    """
    folder = Path(get_temp_dir())
    if not (folder / _ALIVE).exists():
        delete_temporary_folders()
        new = folder / f"{_ALIVE}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)  # open until the process ends
        held = [lock]  # empty in a child: in the child's children the number may be another file's

        def close_in_fork() -> None:
            while held:
                os.close(held.pop())

        os.register_at_fork(after_in_child=close_in_fork)
        lock_if_possible(lock)
        new.rename(folder / _ALIVE)  # only when locked: other programs delete unlocked folders


def delete_temporary_folders() -> None:
    """Delete the ``pymp-*`` folders that programs with this plugin left when they were killed."""
    for alive in Path(tempfile.gettempdir()).glob(f"pymp-*/{_ALIVE}"):
        delete_abandoned(alive, alive.parent)
