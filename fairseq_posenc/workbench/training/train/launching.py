"""The start of fairseq-train, with all that it prints in a log as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from fairseq_posenc.workbench.training.train.request import Run


def become(run: Run) -> NoReturn:
    """Become fairseq-train, so that signals reach it and its exit code is the command's.

    Raises:
        UserError: there is nothing to start from, or the folder has another run.
    """
    command = _begin(run)
    _replace(command, run.folder)


def wait_for(run: Run) -> int:
    """Run it to its end in a process of its own; return its exit code.

    Raises:
        UserError: as :func:`become`.
        KeyboardInterrupt: the process has ended by then.
    """
    command = _begin(run)
    child = os.fork()
    if child == 0:
        _replace(command, run.folder)
    try:
        return _exit_code(child)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        _exit_code(child)
        raise


def _begin(run: Run) -> list[str]:
    command = run.full_command()
    run.stage.claim()
    sys.stdout.flush()  # or a process that is forked would write it again
    return command


def _replace(command: list[str], folder: Path) -> NoReturn:
    """Make another program of this process, which prints into a log as well."""
    # fairseq's own --log-file repeats every line once more in each epoch. Ctrl-C, which goes to all
    # programs of a terminal, must not end the log before the training; nor must a closed reader of
    # the output, which Python ignores and lets tee ignore as well.
    tee = subprocess.Popen(
        ["tee", "-i", "-a", str(folder / "train.log")], stdin=subprocess.PIPE, restore_signals=False
    )
    assert tee.stdin is not None
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    os.execv(command[0], command)


def _exit_code(child: int) -> int:
    """Wait for a process; return its exit code as shells do."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 128 - code if code < 0 else code
