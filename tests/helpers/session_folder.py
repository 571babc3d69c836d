"""One temporary folder for each session of tests, which nothing outlives.

Tests and their programs put everything there: pytest's ``pytest-of-USER``, multiprocessing's
``pymp-*``, torchrun's ``torchelastic_*``. It is deleted when the session ends, also by Ctrl-C; if
the session is killed, the next one deletes it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from fairseq_posenc.files import delete_abandoned, lock_if_possible

_PREFIX = "fairseq-posenc-session-"
_ALIVE = "alive"  # a file that the session holds locked
_VARIABLE = "FAIRSEQ_POSENC_TESTS_SESSION"  # set in all processes of a session


def use_session_folder() -> None:
    """Make the temporary folder of this session, if this process begins one, and use it."""
    if _VARIABLE in os.environ:  # a worker, or a program of a test
        return
    place = Path(tempfile.gettempdir())
    for alive in place.glob(f"{_PREFIX}*/{_ALIVE}"):
        delete_abandoned(alive, alive.parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    folder.chmod(0o755)  # a cluster's daemons are other users
    new = folder / f"{_ALIVE}.new"
    lock_if_possible(os.open(new, os.O_RDWR | os.O_CREAT, 0o600))  # open until the process ends
    new.rename(folder / _ALIVE)  # only when locked: other sessions delete unlocked folders
    os.environ[_VARIABLE] = os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # look it up again
    session = os.getpid()

    def delete() -> None:
        if os.getpid() == session:  # not a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
