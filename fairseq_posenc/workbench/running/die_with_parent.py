"""Runs a program that dies with its parent: ``python die_with_parent.py PID PROGRAM ...``.

A process that is killed outright (``kill -9``, lack of memory) cannot end the programs that it
started. On Linux a process can ask to be killed when its parent dies (PR_SET_PDEATHSIG), and keeps
that wish when it executes another program; other systems have nothing like it. This file is run by
its path and imports nothing of the package, so it adds only some hundredths of a second.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(command: list[str]) -> list[str]:
    """Build the command line that runs a command (its program by path) and ties it to this process.

    The thread that starts the command must outlive it: for Linux that thread is the parent.
    """
    if not sys.platform.startswith("linux"):
        return command
    flags = "-IS"  # isolated, and without site-packages: it starts at once
    return [sys.executable, flags, __file__, str(os.getpid()), *command]


def _execute(parent: int, command: list[str]) -> None:
    """Ask to be killed when the parent dies, and execute the command in this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else the parent died before the request
        os.execv(command[0], command)


if __name__ == "__main__":
    _execute(int(sys.argv[1]), sys.argv[2:])
