"""Works on one run until its result.

Each run has a process of its own, on this machine or on another: ``python -m
fairseq_posenc.workbench.finetuning.glue.worker FOLDER``. A worker on this machine reports
to the command that started it: a JSON object a line, with ``update`` and ``text``, or ``error``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq, see there)

# isort: split

from fairseq_posenc.checkpoints.error_messages import choose_exit_code, find_message
from fairseq_posenc.checkpoints.recovery import ensure_last_checkpoint
from fairseq_posenc.workbench.finetuning.glue.evaluation import BEST, evaluate
from fairseq_posenc.workbench.finetuning.glue.plan import RESULT, Run, format_override, read_run
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.exit_codes import run_main, signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.running.locks import lock_folder
from fairseq_posenc.workbench.running.logs import read_line
from fairseq_posenc.workbench.running.programs import run_logged

LOG = "train.log"
Report = Callable[[int, str], None]  # takes the updates made, and a line about the run
_PAUSE = 15.0  # seconds between two lines about one run
# Chosen where the run is, which may be another machine than that of the command.
_ON_CPU = ["common.cpu=true", "common.fp16=false"]


def work(folder: Path, report: Report) -> None:
    """Train and evaluate the run of a folder, if it is not finished.

    Raises:
        UserError: another process works on it.
        RunError: it failed.
    """
    run = read_run(folder)
    with lock_folder(folder, "run") as lock:
        if (folder / RESULT).exists():
            return
        if updates_done(folder) < run.max_update or not (folder / BEST).exists():
            _train(run, folder, lock, report)
        evaluate(run, folder)
    figures = read_json(folder / RESULT)["metrics"]
    scores = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    report(run.max_update, f"{run.label}: finished, {scores}")


def _train(run: Run, folder: Path, lock: int, report: Report) -> None:
    ensure_last_checkpoint(folder)
    done = updates_done(folder)
    how = f"going on from update {done:,}" if done else f"starting, {run.max_update:,} updates"
    report(done, f"{run.label}: {how}")
    machine = [] if choose_device() == "cuda" or _ON_CPU[0] in run.command else _ON_CPU
    if machine:
        report(done, f"{run.label}: no GPU here, so on the processor and without fp16")
    # fairseq starts from it unless the folder has a last checkpoint.
    start = format_override("checkpoint.finetune_from_model", run.checkpoint)
    last = time.monotonic()

    def read(text: str) -> None:
        """Report validations, and the updates now and then."""
        nonlocal last
        line, score = read_line(text), ""
        if line is None:
            return
        if line.kind == "valid" and run.metric in line.figures:
            score = f", {run.metric} {float(line.figures[run.metric]):.2f}"
        elif line.kind != "train_inner" or time.monotonic() - last < _PAUSE:
            return
        last = time.monotonic()
        where = f"update {line.updates:,} of {run.max_update:,}"
        report(line.updates, f"{run.label}: {where}{score}")

    run_logged([*run.command, *machine, start], folder / LOG, lock, read)


def main() -> int:
    """Work on the folder that is the only argument; return the exit code."""
    try:
        with signals_as_keyboard_interrupt():
            work(Path(sys.argv[1]), lambda update, text: _send(update=update, text=text))
    except Exception as error:
        message = find_message(error)
        if message is None:
            raise
        _send(error=message)
        return choose_exit_code(error)
    return 0


def _send(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
