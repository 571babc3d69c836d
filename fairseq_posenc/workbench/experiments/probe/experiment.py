"""The experiment of a probe: data of each task, and models that learn it."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import fmean

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.experiment import Experiment
from fairseq_posenc.workbench.experiments.probe.data import (
    DATA_SEED,
    EXAMPLES,
    READ,
    split_names,
    write_reading,
    write_training,
)
from fairseq_posenc.workbench.experiments.probe.settings import TASKS, WHOLE, TaskSettings
from fairseq_posenc.workbench.experiments.probe.tasks import Task
from fairseq_posenc.workbench.experiments.settings import Run
from fairseq_posenc.workbench.experiments.trainings import Trial, validate_command
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

_RIGHT = re.compile(r'"length-(\d+)(?:-depth-([\d.]+))?_exact": "?([\d.]+)')


class TaskExperiment(Experiment[TaskSettings]):
    """Models that learn a task each and are read at many lengths."""

    def prepare(self) -> Outputs:
        """Write the questions and answers of all tasks."""
        settings = self.settings
        say(f"data: {', '.join(task.name for task in settings.tasks)}")
        for task in settings.tasks:
            self._write(task, *self._stages(task.name))
        return {}

    def _write(self, task: Task, train: Stage, read: Stage) -> None:
        settings, family = self.settings, self.settings.family
        train.do(lambda: write_training(task, family, settings.trained, train.folder))
        read.do(lambda: write_reading(task, family, settings.lengths, read.folder))

    def trial(self, run: Run) -> Trial:
        """Build a training on one task, measured at all lengths."""
        settings, (train, read) = self.settings, self._stages(run.case)
        task = next(each for each in settings.tasks if each.name == run.case)
        splits = ",".join(split_names(task, settings.lengths))
        options = (*TASKS[settings.family], "--valid-subset", splits, *WHOLE)
        measure = validate_command(read.folder, settings.folder(run), *options)
        return self._trial(run, train, measure, parse_shares)

    def _stages(self, task: str) -> tuple[Stage, Stage]:
        """Build the stages of what is trained on, and of what is read."""
        settings, folder = self.settings, self.settings.task_data(task)
        common = {
            **{"task": task, "family": settings.family},
            **{"seed": DATA_SEED, "version": __version__},
        }
        train = {**common, "longest": settings.trained, "examples": EXAMPLES}
        read = {**common, "lengths": settings.lengths, "examples": READ}
        return Stage(folder / "train", train), Stage(folder / "read", read)


def parse_shares(lines: list[str]) -> Outputs:
    """Parse the shares of right answers, by length, from the lines of ``fairseq-validate``.

    Where a task has depths, also by both, as in ``40@0.25``; that of a length is their mean.
    """
    shares: dict[str, float] = {}
    by_length = defaultdict(list)
    for found in filter(None, map(_RIGHT.search, lines)):
        length, depth, share = found.groups()
        by_length[length].append(float(share))
        if depth is not None:
            shares[f"{length}@{depth}"] = float(share)
    return {**{length: fmean(each) for length, each in by_length.items()}, **shares}
