"""One run, from wherever it was stopped to its result: ``python -m fairseq_posenc.glue.worker``.

It stands in a process of its own, so that it runs alike beside others and on another machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fairseq_posenc.running import host  # noqa: F401  (before fairseq, see there)

# isort: split

from fairseq_posenc.glue.evaluation import BEST, evaluate
from fairseq_posenc.glue.plan import RESULT, Run, override, read_run
from fairseq_posenc.running.checkpoints import updates_done
from fairseq_posenc.running.devices import choose_device
from fairseq_posenc.running.ending import ended
from fairseq_posenc.running.files import read_json
from fairseq_posenc.running.interruption import any_end_like_ctrl_c
from fairseq_posenc.running.locking import hold
from fairseq_posenc.running.logs import read_line
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.progress import say
from fairseq_posenc.transformer.mending import ensure_last

LOG = "train.log"
_PAUSE = 15.0  # seconds between two lines about one run
# Chosen where the run is, which may be another machine than that of the command.
_ON_CPU = ["common.cpu=true", "common.fp16=false"]


def work(folder: Path) -> None:
    """Train and evaluate the run of a folder, if it is not finished.

    Raises:
        UserError: another process is at it.
        RunError: it failed.
    """
    run = read_run(folder)
    with hold(folder, "run") as lock:
        if (folder / RESULT).exists():
            return
        if updates_done(folder) < run.max_update or not (folder / BEST).exists():
            _train(run, folder, lock)
        evaluate(run, folder)
    figures = read_json(folder / RESULT)["metrics"]
    shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    say(f"{run.label}: finished, {shown}")


def _train(run: Run, folder: Path, lock: int) -> None:
    ensure_last(folder)
    done = updates_done(folder)
    how = f"going on from update {done:,}" if done else f"starting, {run.max_update:,} updates"
    say(f"{run.label}: {how}")
    machine = [] if choose_device() == "cuda" or _ON_CPU[0] in run.command else _ON_CPU
    if machine:
        say(f"{run.label}: no GPU here, so on the processor and without fp16")
    # fairseq starts from it unless the folder has a last checkpoint.
    start = override("checkpoint.finetune_from_model", run.checkpoint)
    run_logged([*run.command, *machine, start], folder / LOG, lock, _Watch(run).read)


class _Watch:
    """Tells of validations, and now and then of updates, in what fairseq logs."""

    def __init__(self, run: Run) -> None:
        self._run, self._last = run, time.monotonic()

    def read(self, text: str) -> None:
        line = read_line(text)
        if line is None:
            return
        if line.kind == "valid" and self._run.metric in line.figures:
            score = float(line.figures[self._run.metric])
            self._tell(line.updates, f", {self._run.metric} {score:.2f}")
        elif line.kind == "train_inner" and time.monotonic() - self._last >= _PAUSE:
            self._tell(line.updates, "")

    def _tell(self, update: int, more: str) -> None:
        self._last = time.monotonic()
        say(f"{self._run.label}: update {update:,} of {self._run.max_update:,}{more}")


def main() -> None:
    """Work on the folder that is the only argument."""
    with any_end_like_ctrl_c():
        work(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(ended(main))
