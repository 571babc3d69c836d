"""One run, from wherever it was stopped to its result: ``python -m fairseq_posenc.glue.worker``.

It stands in a process of its own, so that it runs alike beside others and on another machine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.compare.training import newest_checkpoint, updates_done
from fairseq_posenc.errors import UserError
from fairseq_posenc.glue.evaluation import BEST, evaluate
from fairseq_posenc.glue.plan import RESULT, Run, override, read_run
from fairseq_posenc.running.interruption import STOPPED, any_end_like_ctrl_c
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.progress import say

LOG, _LOCK = "train.log", "lock"
# `log_format: json` writes lines such as `[DATE][valid][INFO] - {"valid_loss": "6.97", ...}`.
_ENTRY = re.compile(r"\[(train_inner|valid)\]\[INFO\] - (\{.*\})\s*$")
_PAUSE = 15.0  # seconds between two lines about one run
# Chosen where the run is, which may be another machine than that of the command.
_ON_CPU = ["common.cpu=true", "common.fp16=false"]


def work(folder: Path) -> None:
    """Train and evaluate the run of a folder, if it is not finished.

    Raises:
        UserError: another process is at it, or it failed.
    """
    run = read_run(folder)
    with _locked(folder) as lock:
        if (folder / RESULT).exists():
            return
        if updates_done(folder) < run.max_update or not (folder / BEST).exists():
            _train(run, folder, lock)
        evaluate(run, folder)
    figures = json.loads((folder / RESULT).read_text(encoding="utf-8"))["metrics"]
    shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    say(f"{run.label}: finished, {shown}")


def _train(run: Run, folder: Path, lock: int) -> None:
    newest = newest_checkpoint(folder)
    if newest:
        start = override("checkpoint.restore_file", newest)
        say(f"{run.label}: going on from update {updates_done(folder):,}")
    else:
        start = override("checkpoint.finetune_from_model", run.checkpoint)
        say(f"{run.label}: starting, {run.max_update:,} updates")
    machine = [] if torch.cuda.is_available() else _ON_CPU
    if machine:
        say(f"{run.label}: no GPU here, so on the processor and without fp16")
    command = [*run.command, *machine, start]
    run_logged(command, folder / LOG, lock, _Watch(run).read)


class _Watch:
    """Tells of validations, and now and then of updates, in what fairseq logs."""

    def __init__(self, run: Run) -> None:
        self._run, self._last = run, time.monotonic()

    def read(self, line: str) -> None:
        kind, figures = _figures(line)
        now = time.monotonic()
        if kind == "valid" and f"valid_{self._run.metric}" in figures:
            score = float(figures[f"valid_{self._run.metric}"])
            self._tell(int(figures["valid_num_updates"]), f", {self._run.metric} {score:.2f}")
        elif kind == "train_inner" and now - self._last >= _PAUSE:
            self._tell(int(figures["num_updates"]), "")

    def _tell(self, update: int, more: str) -> None:
        self._last = time.monotonic()
        say(f"{self._run.label}: update {update:,} of {self._run.max_update:,}{more}")


def _figures(line: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of a line of the log and its figures; "" for any other line."""
    found = _ENTRY.search(line)
    return (found[1], json.loads(found[2])) if found else ("", {})


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold a run's folder; a training that outlives its worker holds it, too."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise UserError(f"{folder}: another process is at this run; wait for its end") from None
    finally:
        os.close(lock)


def main() -> int:
    """Work on the folder that is the only argument; return the exit code."""
    logging.getLogger().setLevel(logging.WARNING)  # importing fairseq turns everything on
    try:
        with any_end_like_ctrl_c():
            work(Path(sys.argv[1]))
    except KeyboardInterrupt:
        return STOPPED
    except UserError as error:
        print(f"fairseq-posenc: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
