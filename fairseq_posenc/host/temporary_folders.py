"""Temporary folders of multiprocessing: one for each program, deleted also if it was killed."""

import os
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

from fairseq_posenc.files import delete_abandoned, lock_if_possible

_ALIVE = "fairseq-posenc-is-alive"


def share_temporary_folder() -> None:
    """Let all processes of this program share one folder of multiprocessing's, ``pymp-*``.

    Each would have its own, and leave it behind: data loaders kill their workers. The first process
    deletes the folder when it ends; of a killed one, the next program does.
    """
    folder = Path(get_temp_dir())
    if not (folder / _ALIVE).exists():
        delete_temporary_folders()
        new = folder / f"{_ALIVE}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)  # until the process ends
        held = [lock]  # not in a fork of a fork, where the number may be another file's

        def close_in_fork() -> None:
            while held:
                os.close(held.pop())

        os.register_at_fork(after_in_child=close_in_fork)
        lock_if_possible(lock)
        new.rename(folder / _ALIVE)  # locked already: nobody takes the folder for abandoned


def delete_temporary_folders() -> None:
    """Delete the ``pymp-*`` folders that programs with this plugin left when they were killed."""
    for alive in Path(tempfile.gettempdir()).glob(f"pymp-*/{_ALIVE}"):
        delete_abandoned(alive, alive.parent)
