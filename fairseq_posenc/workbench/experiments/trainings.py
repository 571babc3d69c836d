"""Trains small models with ``fairseq-train``, several at a time, on this machine or on a cluster.

An experiment is a list of training runs. The log and the checkpoints in a run's folder show what it
has reached: fairseq continues from the last checkpoint, and a run with more updates continues a
shorter one.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.recovery import LAST, ensure_last_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.errors import RunError, UserError, counted
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, Curve, read_curve_file
from fairseq_posenc.workbench.running.programs import Environment, run_logged
from fairseq_posenc.workbench.running.progress import bar, say

POINTS = 10  # validations of a training run, each with a checkpoint
_NEVER = 10**9  # epochs between validations and checkpoints: intervals are in updates instead
_TAIL_BYTES = 4096  # of a log, with its last figures
_UPDATES = re.compile(r'num_updates": "?(\d+)')  # as fairseq's JSON logs have it: `"20"` or 20
_DIVERGED = re.compile(r"training stopped at update ([\d,]+): ")  # our line on fairseq's error
# Sums over several threads depend on their number; with one thread, figures are the same on any
# number of cores. Small models also train faster in parallel than one after the other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class TrainingRun(NamedTuple):
    """A training run of a small model."""

    label: str  # its name in messages
    folder: Path  # for the checkpoints and the log
    updates: int
    command: tuple[str, ...]  # `fairseq-train` and its options (:func:`train_command`)

    @property
    def log(self) -> Path:
        """The log of ``fairseq-train``, over all interruptions."""
        return self.folder / TRAIN_LOG

    @property
    def reached(self) -> int:
        """The updates in the last figures of the log, at most ``updates``."""
        found = next(reversed(_UPDATES.findall(_read_end_of_log(self.log))), 0)
        return min(int(found), self.updates)


class TrainingEnd(NamedTuple):
    """The results of a finished run; if it diverged, only ``curve`` and ``diverged_at`` are set."""

    curve: Curve  # ends with the validation at the last update, unless the run diverged
    seconds: float = math.nan  # fairseq's time of training, without start-up
    position_parameters: int = 0  # number of elements of all position parameters
    diverged_at: int = 0  # update at which it diverged; 0 if it did not

    @property
    def perplexity(self) -> float:
        """Validation perplexity at the last update; NaN if the run diverged."""
        return math.nan if self.diverged_at else self.curve.validations[-1].perplexity


def train_command(
    data: Path, folder: Path, updates: int, seed: int, options: Sequence[str]
) -> tuple[str, ...]:
    """Build the command of a run that validates and saves at ``POINTS`` of its updates.

    Args:
        data: the data-bin.
        folder: for the checkpoints.
        updates: training updates.
        seed: random seed of initial weights, order of the data, and masks.
        options: options of ``fairseq-train``, with ``--user-dir``, model and task; they win.
    """
    interval = max(1, updates // POINTS)
    fixed = (
        f"--max-update {updates} --seed {seed} "
        f"--validate-interval-updates {interval} --save-interval-updates {interval} "
        f"--keep-interval-updates 1 --no-epoch-checkpoints --save-interval {_NEVER} "
        f"--validate-interval {_NEVER} --log-format json --log-interval {min(20, interval)} "
        "--num-workers 0 --distributed-world-size 1"  # one process: other runs use the other cores
    )
    return ("fairseq-train", str(data), "--save-dir", str(folder), *fixed.split(), *options)


def read_end(training: TrainingRun) -> TrainingEnd | None:
    """Read the results of a run; None if it is not finished.

    Raises:
        UserError: it was trained for more updates.
    """
    if stop := _DIVERGED.search(_read_end_of_log(training.log)):
        return TrainingEnd(read_curve_file(training.log), diverged_at=int(stop[1].replace(",", "")))
    if training.reached < training.updates:
        return None  # without reading a checkpoint: progress is shown every second
    saved = updates_done(training.folder)  # by its last checkpoint
    if saved > training.updates:
        advice = f"give --updates {saved} or more, or another --out"
        raise UserError(f"{training.label}: was trained for {counted(saved, 'updates')}; {advice}")
    # fairseq deletes old checkpoints last: while there are any, the run is not finished.
    if saved < training.updates or _list_old_checkpoints(training.folder):
        return None
    curve = read_curve_file(training.log)
    if not curve.validations or (last := curve.validations[-1]).updates != training.updates:
        return None
    if not last.is_finite:  # the last update diverged; fairseq would stop only at the next one
        return TrainingEnd(curve, diverged_at=training.updates)
    with open_checkpoint(training.folder / LAST) as state:
        sizes = [x.numel() for name, x in state["model"].items() if is_position_parameter(name)]
        seconds = state["extra_state"]["previous_training_time"]
    return TrainingEnd(curve, seconds, sum(sizes))


def train(training: TrainingRun, environment: Environment) -> None:
    """Train a model from its last checkpoint to its last update, unless it is finished.

    If it diverges, that is a result, not a failure. ``environment`` selects the GPU.

    Raises:
        RunError: ``fairseq-train`` failed, or the log lacks the last validation.
        UserError: another process trains in its folder, or it was trained for more updates.
    """
    with lock_folder(training.folder) as lock:  # fairseq-train, which may outlive us, holds it too
        ensure_last_checkpoint(training.folder)  # a kill may have torn it
        for checkpoint in _list_old_checkpoints(training.folder):
            checkpoint.unlink()
        if read_end(training):
            return
        if (saved := updates_done(training.folder)) < training.updates:  # else the log lost its end
            if saved:
                say(f"{training.label}: continues at update {saved:,}")
            try:
                variables = {**_ONE_THREAD, **environment}
                run_logged(training.command, training.log, lock, environment=variables)
            except RunError:
                if read_end(training) is None:  # it did not diverge or reach its end
                    raise
        if read_end(training) is None:
            raise RunError(f"{training.folder}: its log has no last validation; delete the folder")


def train_all(
    trainings: Sequence[TrainingRun],
    run_tasks: Callable[..., None],
    on_end: Callable[[TrainingRun, TrainingEnd], object],
) -> None:
    """Train all models that are not finished, with a progress bar over all updates.

    Args:
        trainings: the runs, in the order in which they begin.
        run_tasks: such as ``programs.run_here``, which calls each task with the variables of a GPU.
        on_end: called with each run that is finished, also by an earlier command.

    Raises:
        RunError: a run failed.
    """
    unfinished = list(trainings)
    total, initial = sum(x.updates for x in trainings), sum(x.reached for x in trainings)
    with bar(desc="all runs", total=total, unit=" updates", initial=initial) as shown:

        def show_progress() -> None:
            """Show how far the runs are (one that diverged counts in full), and which ended."""
            for training in unfinished[:]:
                if end := read_end(training):
                    unfinished.remove(training)
                    on_end(training, end)
            updates = sum(x.reached if x in unfinished else x.updates for x in trainings)
            shown.update(updates - shown.n)

        show_progress()
        if tasks := {training.label: partial(train, training) for training in unfinished}:
            run_tasks(tasks, watch=show_progress)
        show_progress()


def _list_old_checkpoints(folder: Path) -> list[Path]:
    """List ``checkpoint_EPOCH_UPDATES.pt`` but the newest; fairseq deletes them after a save."""
    checkpoints = folder.glob("checkpoint_*_*.pt")
    return sorted(checkpoints, key=lambda path: int(path.stem.rpartition("_")[2]))[:-1]


def _read_end_of_log(log: Path) -> str:
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
