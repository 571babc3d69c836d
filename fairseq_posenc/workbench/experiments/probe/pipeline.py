"""All steps of a probe in order; those that are done are not repeated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.probe.data import (
    DATA_SEED,
    EXAMPLES,
    READ,
    split_name,
    write_reading,
    write_training,
)
from fairseq_posenc.workbench.experiments.probe.settings import (
    TASKS,
    TRAIN_OPTIONS,
    WHOLE,
    Settings,
)
from fairseq_posenc.workbench.experiments.probe.tasks import Task
from fairseq_posenc.workbench.experiments.trainings import (
    Trial,
    measuring_command,
    run_trials,
    training_options,
)
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

_RIGHT = re.compile(r'"length-(\d+)_exact": "?([\d.]+)')


class Outcome(NamedTuple):
    """What came out of one training.

    Attributes:
        task: the task's name.
        contender: the model.
        seed: of everything random in it.
        exact: share of right answers by the questions' length; none is where it diverged.
        seconds: time of the training; None where it diverged.
    """

    task: str
    contender: Variant
    seed: int
    exact: dict[int, float]
    seconds: Optional[float]


class _Run(NamedTuple):
    task: Task
    contender: Variant
    seed: int

    @property
    def named(self) -> tuple[str, Variant, int]:
        return self.task.name, self.contender, self.seed

    @property
    def label(self) -> str:
        return f"{self.task.name}, {self.contender.name}, seed {self.seed}"


def run_probe(settings: Settings, jobs: int, lock: int) -> list[Outcome]:
    """Do all steps and return the outcomes.

    Args:
        settings: the user's choices.
        jobs: trainings at a time.
        lock: open file that the started programs keep open.

    Raises:
        UserError: a command failed.
    """
    runs = [
        _Run(task, contender, seed)
        for seed in settings.seeds
        for task in settings.tasks
        for contender in settings.contenders
    ]
    say(f"data: {', '.join(task.name for task in settings.tasks)}")
    data = {task.name: _data_steps(settings, task) for task in settings.tasks}
    trials = [_trial(settings, run, *data[run.task.name]) for run in runs]
    return [
        Outcome(*run.named, _by_length(facts, settings.lengths), facts.get("seconds"))
        for run, facts in zip(runs, run_trials(trials, jobs, lock))
    ]


def _data_steps(settings: Settings, task: Task) -> tuple[Stage, Stage]:
    """Make what is trained on, and what is read; return both steps."""
    family, folder = settings.family, settings.out / settings.family / "data" / task.name
    common = {"task": task.name, "family": family, "seed": DATA_SEED, "version": __version__}
    trained = Stage(folder / "train", {**common, "longest": settings.trained, "examples": EXAMPLES})
    read = Stage(folder / "read", {**common, "lengths": settings.lengths, "examples": READ})
    trained.do(lambda: write_training(task, family, settings.trained, trained.folder))
    read.do(lambda: write_reading(task, family, settings.lengths, read.folder))
    return trained, read


def _trial(settings: Settings, run: _Run, data: Stage, read: Stage) -> Trial:
    folder = _folder(settings, run)
    every = max(1, settings.updates // 10)
    options = [*TRAIN_OPTIONS[settings.family], *run.contender.options]
    inputs = {"data": data.inputs, "options": options, "seed": run.seed, "version": __version__}
    how = training_options(folder, settings.updates, run.seed, every)
    how_read = ["--valid-subset", ",".join(map(split_name, settings.lengths)), *WHOLE]
    measure = measuring_command(read.folder, folder, *TASKS[settings.family], *how_read)
    train = ["fairseq-train", str(data.folder), *options, *how]
    return Trial(run.label, Stage(folder, inputs, settings.updates), train, measure, read_shares)


def _folder(settings: Settings, run: _Run) -> Path:
    models = settings.out / settings.family / "models"
    return models / run.task.name / run.contender.folder / f"seed-{run.seed}"


def read_shares(lines: list[str]) -> Outputs:
    """Return the shares of right answers from what ``fairseq-validate`` printed, by length."""
    return {found[1]: float(found[2]) for line in lines if (found := _RIGHT.search(line))}


def _by_length(facts: Outputs, lengths: Sequence[int]) -> dict[int, float]:
    return {length: facts.get(str(length), 0.0) for length in lengths}
