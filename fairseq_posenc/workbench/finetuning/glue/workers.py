"""Many runs on this machine: some at a time, each in a process and on a GPU of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fairseq_posenc.workbench.finetuning.glue.runs import GlueRun
from fairseq_posenc.workbench.running.programs import run_parallel, run_watched
from fairseq_posenc.workbench.running.progress import bar, say

_WORKER = "fairseq_posenc.workbench.finetuning.glue.worker"


class Workers:
    """Works on runs until all are done or have failed.

    Args:
        runs: runs that are not finished.
        out: folder of their folders.
        jobs: runs at a time; None for one on each GPU.
    """

    def __init__(self, runs: Sequence[GlueRun], out: Path, jobs: int | None) -> None:
        gpus = visible_gpus()
        self._runs, self._out = runs, out
        self._ended: list[GlueRun] = []
        self._jobs = min(jobs or len(gpus) or 1, len(runs))
        self._free: SimpleQueue[dict[str, str]] = SimpleQueue()  # environments of the runs to come
        for slot in range(self._jobs):
            self._free.put({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
        self._bar = bar("glue", sum(run.max_update for run in runs), " updates")

    def work(self) -> list[str]:
        """Work on all runs; return a line for each that failed.

        Raises:
            KeyboardInterrupt: Ctrl-C; everything that was started has ended by then.
        """
        try:
            failures = run_parallel(
                [partial(self._run_worker, run) for run in self._runs], self._jobs
            )
        finally:
            self._bar.close()
        return [failure for failure in failures if failure]

    def _run_worker(self, run: GlueRun) -> str:
        """Work on a run; return a line about its failure, "" without one."""
        updates, error = 0, ""

        def read(line: str) -> None:
            nonlocal updates, error
            message = _parse_message(line)
            error = message.get("error", error)
            if "text" in message:
                say(f"{self._format_state()} {message['text']}")
            if "update" in message:
                self._bar.update(message["update"] - updates)
                updates = message["update"]

        environment = self._free.get()
        try:
            folder = str(run.folder(self._out))
            words = [sys.executable, "-m", _WORKER, folder]
            status = run_watched(words, read, None, {**environment, "PYTHONWARNINGS": "ignore"})
        finally:
            self._free.put(environment)
        self._bar.update(run.max_update - updates)
        self._ended.append(run)
        if not status:
            return ""
        reason = error or f"ended with status {status}"
        say(f"{self._format_state()} {run.label}: {reason}")
        return f"{run.label}: {reason.splitlines()[0].rstrip(' :')}"

    def _format_state(self) -> str:
        return f"[{len(self._ended)} of {len(self._runs)} runs ended]"


def _parse_message(line: str) -> dict[str, Any]:
    """Parse a line of a worker; one of another program, such as a warning, is text."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, dict) else {"text": line.rstrip()}


def visible_gpus() -> list[str]:
    """List the GPUs by their names in ``CUDA_VISIBLE_DEVICES``, those of the user's choice."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]
