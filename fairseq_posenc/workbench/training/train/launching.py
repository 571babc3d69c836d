"""The start of fairseq-train, with all that it prints in a log as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from fairseq_posenc.checkpoints.recovery import ensure_last_checkpoint, newest_checkpoint
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.stages import Piece
from fairseq_posenc.workbench.training.train.request import Run

LOG = "train.log"


def become(run: Run) -> NoReturn:
    """Become fairseq-train, so that signals reach it and its exit code is the command's.

    Raises:
        UserError: there is nothing to start from, or the folder has another run.
    """
    command = _begin(run)
    _replace(command, run.folder)


def as_piece(run: Run) -> Piece:
    """Build the piece of work that a run is, here or on a cluster."""
    return Piece(
        str(run.folder),
        run.folder,
        work=lambda lock: _train(run, lock),
        is_done=run.is_done,
        progress=lambda: newest_checkpoint(run.folder),
    )


def _train(run: Run, lock: int) -> None:
    ensure_last_checkpoint(run.folder)
    command = _begin(run)
    run_logged(command, run.folder / LOG, lock, lambda line: print(line, end="", flush=True))
    run.stage.finish({"until": run.until})


def _begin(run: Run) -> list[str]:
    command = run.command()
    run.stage.claim()
    sys.stdout.flush()  # or a process that is forked would write it again
    return command


def _replace(command: list[str], folder: Path) -> NoReturn:
    """Make another program of this process, which prints into a log as well."""
    # fairseq's own --log-file repeats every line once more in each epoch. Ctrl-C, which goes to all
    # programs of a terminal, must not end the log before the training; nor must a closed reader of
    # the output, which Python ignores and lets tee ignore as well.
    tee = subprocess.Popen(
        ["tee", "-i", "-a", str(folder / LOG)], stdin=subprocess.PIPE, restore_signals=False
    )
    assert tee.stdin is not None
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    os.execv(command[0], command)
