"""Many runs on this machine: some at a time, each in a process and on a GPU of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from fairseq_posenc.glue.plan import Run
from fairseq_posenc.running.programs import told_mistake
from fairseq_posenc.running.progress import bar, say
from fairseq_posenc.running.tethered import tethered

_WORKER = "fairseq_posenc.glue.worker"
UPDATE = re.compile(r"update ([\d,]+)")  # as it tells how far it is


class Workers:
    """Works on runs until all are done or have failed.

    Args:
        runs: what is still to be done.
        out: folder of their folders.
        jobs: how many at a time; None for one on each GPU.
    """

    def __init__(self, runs: Sequence[Run], out: Path, jobs: int | None) -> None:
        self._waiting, self._out, self._total = deque(runs), out, len(runs)
        self._gpus = visible_gpus()
        self._jobs = min(jobs or len(self._gpus) or 1, len(runs))
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._failures: list[str] = []
        self._ended = 0
        self._bar = bar("glue", sum(run.max_update for run in runs), " updates")
        self._lock = threading.Lock()

    def work(self) -> list[str]:
        """Return a line for each run that failed.

        Raises:
            KeyboardInterrupt: Ctrl-C; all that was started has ended by then.
        """
        threads = [threading.Thread(target=self._serve, args=(slot,)) for slot in range(self._jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # without a limit, signals would wait as well
        finally:
            with self._lock:
                self._waiting.clear()
                for process in self._processes.values():
                    process.terminate()
            for thread in threads:
                thread.join()
            self._bar.close()
        return self._failures

    def _serve(self, slot: int) -> None:
        while (started := self._start(slot)) is not None:
            run, process = started
            message, updates = "", 0
            assert process.stdout is not None
            for line in process.stdout:
                if told := told_mistake(line):
                    message = told.rstrip(" :")
                else:
                    say(f"{self._state()} {line.rstrip()}")
                if done := UPDATE.search(line):
                    self._bar.update(int(done[1].replace(",", "")) - updates)
                    updates = int(done[1].replace(",", ""))
            self._bar.update(run.max_update - updates)
            self._end(slot, run, process.wait(), message)

    def _start(self, slot: int) -> tuple[Run, subprocess.Popen[str]] | None:
        with self._lock:
            if not self._waiting:
                return None
            run = self._waiting.popleft()
            gpu = {"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {}
            process = subprocess.Popen(
                tethered([sys.executable, "-m", _WORKER, str(run.folder(self._out))]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **gpu, "PYTHONWARNINGS": "ignore"},
                start_new_session=True,  # Ctrl-C reaches only this program, which then ends it
            )
            self._processes[slot] = process
        return run, process

    def _end(self, slot: int, run: Run, status: int, message: str) -> None:
        with self._lock:
            del self._processes[slot]
            self._ended += 1
            if status:
                self._failures.append(f"{run.label}: {message or f'ended with status {status}'}")
                say(f"{self._state()} {self._failures[-1]}")

    def _state(self) -> str:
        return f"[{self._ended} of {self._total} runs ended]"


def visible_gpus() -> list[str]:
    """Return the names of the GPUs for ``CUDA_VISIBLE_DEVICES``, those of the user's own choice."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]
