"""Runs a program that dies with its parent: ``python die_with_parent.py PID PROGRAM ...``.

Whoever is killed outright (``kill -9``, lack of memory) cannot end what it started. Linux does it,
if a program asks for that before it becomes another; no other system has such a wish. The file is
run by its path and imports nothing of the package, so that it costs some hundredths of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(command: list[str]) -> list[str]:
    """Build the command line that ties a command (its program by path) to this process.

    The thread that starts it has to live as long.
    """
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it has ended already
        os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
