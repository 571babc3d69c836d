"""Trials, many small trainings in parallel: each can be continued, and is measured at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.checkpoints.recovery import LAST, ensure_last_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.host.divergence import parse_stop_update
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.running.devices import choose_device, cores
from fairseq_posenc.workbench.running.host import USER_DIR
from fairseq_posenc.workbench.running.logs import parse_line, read_curve_file
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Job, Outputs, Place, Stage

LOG = "train.log"
# A sum over several threads depends on their number: with one, a seed's figures are the same on any
# number of cores. Small models train faster so, too, than one by one on all cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Trial(NamedTuple):
    """A training, and the command that measures its model."""

    label: str  # what messages call it
    # the folder of its checkpoints and log, whose stamp notes the inputs and, at the end, figures
    stage: Stage
    train: Sequence[str]  # command of `fairseq-train`, without `--user-dir`
    # command that measures the model, where the last validation of its training does not
    measure: Sequence[str] = ()
    # parses the lines that `measure` prints into figures by name
    parse_figures: Callable[[list[str]], Outputs] = lambda lines: {}


def default_jobs() -> int:
    """Count the trainings to run at a time: one on a GPU, else one on each core."""
    return 1 if choose_device() == "cuda" else cores()


def read_figures(trial: Trial) -> Optional[Outputs]:
    """Read the figures of a trial from its folder; None if it is not finished.

    These are ``position_parameters``, ``seconds``, and those that were measured. A training that
    diverged has ``diverged`` alone, the update: it is an outcome too, and ends no other.
    """
    trained = trial.stage.outputs
    if trained is None or "diverged" in trained or not trial.measure:
        return trained
    measured = _build_measure_stage(trial).outputs
    return None if measured is None else {**trained, **measured}


def build_job(trial: Trial) -> Job:
    """Build the job of a trial."""
    folder = trial.stage.folder
    return Job(
        trial.label,
        folder,
        work=partial(_work, trial),
        is_done=lambda: read_figures(trial) is not None,
        progress=lambda: updates_done(folder),
        updates=trial.stage.max_updates,
    )


def _build_measure_stage(trial: Trial) -> Stage:
    stage = trial.stage
    inputs = {"model": stage.inputs, "updates": stage.max_updates, "command": list(trial.measure)}
    return Stage(stage.folder / "measured", inputs)


def _work(trial: Trial, place: Place) -> None:
    """Train and measure a model, as far as that is not done."""
    trained = trial.stage.do(partial(_train, trial, place), keep_unfinished=True)
    if trial.measure and "diverged" not in trained:
        stage = _build_measure_stage(trial)
        stage.do(partial(_measure, trial, place, stage.folder))


def _train(trial: Trial, place: Place) -> Outputs:
    label, stage, command = trial.label, trial.stage, trial.train
    log, done = stage.folder / LOG, updates_done(stage.folder)
    if done == stage.max_updates and not _has_last_validation(log, stage.max_updates):
        # Interrupted before its last validation was logged, which fairseq does not repeat.
        shutil.rmtree(stage.folder)
        stage.claim()
        done = 0
    place.report(done, "")

    def report(line: str) -> None:
        if entry := parse_line(line):
            place.report(entry.updates, "")

    # With all updates done, only the stamp is missing: it was interrupted before writing it.
    if done < stage.max_updates:
        where = f"to continue at update {done:,}" if done else f"for {stage.max_updates:,} updates"
        say(f"{label}: starting fairseq-train {where}")
        ensure_last_checkpoint(stage.folder)
        try:
            _run_command(command, log, place, report)
        except RunError as error:
            if not (update := parse_stop_update(str(error))):
                raise
            say(f"{label}: diverged at update {update:,}")
            return {"diverged": update}
        if not _has_last_validation(log, stage.max_updates):
            raise UserError(f"{command[0]} printed no last validation; see its log {log}")
    if not trial.measure:
        say(f"{label}: done; perplexity {read_curve_file(log).entries[-1].perplexity:,.4g}")
    return _read_checkpoint_figures(stage.folder)


def _measure(trial: Trial, place: Place, folder: Path) -> Outputs:
    lines: list[str] = []
    log = folder / "validate.log"
    _run_command(trial.measure, log, place, lines.append)
    if not (figures := trial.parse_figures(lines)):
        raise UserError(f"{trial.measure[0]} printed no figures; see its log {log}")
    shown = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
    say(f"{trial.label}: done; {shown}")
    return figures


def _run_command(
    command: Sequence[str], log: Path, place: Place, on_line: Callable[[str], None]
) -> None:
    ours = command[0] == "fairseq-posenc"  # fairseq's commands have to find the package
    more = [] if ours else ["--user-dir", str(USER_DIR)]
    environment = {**_ONE_THREAD, **place.environment}
    run_logged([*command, *more], log, place.lock, on_line, environment)


def _has_last_validation(log: Path, updates: int) -> bool:
    """Whether a log has the validation at the end of a training."""
    entries = read_curve_file(log).entries if log.is_file() else []
    return bool(entries) and entries[-1].updates == updates


def _read_checkpoint_figures(folder: Path) -> Outputs:
    """Count the position parameters of a trained model, and read the seconds of its training.

    The seconds are fairseq's own: training, validation and writing checkpoints, summed over all
    parts of a continued training, without starting up.
    """
    ensure_last_checkpoint(folder)  # it may have been interrupted while fairseq copied it
    with open_checkpoint(folder / LAST) as state:
        sizes = {key: value.numel() for key, value in state["model"].items()}
        return {
            "position_parameters": sum(n for key, n in sizes.items() if is_position_parameter(key)),
            "seconds": state["extra_state"]["previous_training_time"],
        }
