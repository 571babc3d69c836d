"""Deletes multiprocessing's temporary folders, even those of programs that were killed."""

import os
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

from fairseq_posenc.files import delete_abandoned, lock_if_possible

_ALIVE = "fairseq-posenc-is-alive"


def share_temporary_folder() -> None:
    """Make all processes of this program share one temporary folder of multiprocessing, ``pymp-*``.

    By default every process makes its own when it needs one, and the workers of data loaders, which
    are killed, leave theirs behind. Made here, the folder is handed on to all child processes. The
    first process deletes it when it ends; if it is killed, the next program does.
    """
    folder = Path(get_temp_dir())
    if not (folder / _ALIVE).exists():
        delete_temporary_folders()
        new = folder / f"{_ALIVE}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)  # open until the process ends
        to_close = [lock]

        def close_in_fork() -> None:
            # A child must not hold the lock longer than this process lives. It closes the file only
            # once: a grandchild may have another file of this number.
            while to_close:
                os.close(to_close.pop())

        os.register_at_fork(after_in_child=close_in_fork)
        lock_if_possible(lock)
        new.rename(folder / _ALIVE)  # only when locked: other programs delete unlocked folders


def delete_temporary_folders() -> None:
    """Delete the ``pymp-*`` folders that programs with this plugin left when they were killed."""
    for alive in Path(tempfile.gettempdir()).glob(f"pymp-*/{_ALIVE}"):
        delete_abandoned(alive, alive.parent)
