"""The experiment of ``probe``: write each task's data, train models on it, test them."""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import fmean

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.experiment import Experiment
from fairseq_posenc.workbench.experiments.probe import data, tasks
from fairseq_posenc.workbench.experiments.probe.data import DATA_SEED, EXAMPLES, TEST_EXAMPLES
from fairseq_posenc.workbench.experiments.probe.settings import KEEP_ALL, TASKS, TaskSettings
from fairseq_posenc.workbench.experiments.probe.tasks.base import Task
from fairseq_posenc.workbench.experiments.trainings import Measurement
from fairseq_posenc.workbench.experiments.variants import Run
from fairseq_posenc.workbench.running.jobs import Job, Outputs, Step
from fairseq_posenc.workbench.running.progress import say

_ACCURACY = re.compile(r'"length-(\d+)(?:-depth-([\d.]+))?_exact": "?([\d.]+)')


class TaskExperiment(Experiment[TaskSettings]):
    """Models that are each trained on one task and tested at many lengths."""

    def prepare(self) -> Outputs:
        """Write the data of all tasks, questions and answers."""
        settings = self.settings
        say(f"data: {', '.join(task.name for task in settings.tasks)}")
        for task in settings.tasks:
            for step in self._build_steps(task):
                step.do()
        return {}

    def job(self, run: Run) -> Job:
        """Build a training on one task, and its test at all lengths."""
        settings, task = self.settings, tasks.get(run.case)
        train, test = self._build_steps(task)
        splits = ",".join(data.name_test_splits(task, settings.lengths))
        options = (
            f"{TASKS[settings.family]} --valid-subset {splits} {KEEP_ALL} --log-format json "
            "--num-workers 0 --distributed-world-size 1"
        )
        model = str(settings.folder(run) / LAST)
        measure = ["fairseq-validate", str(test.folder), "--path", model, *options.split()]
        return self._build_job(run, train.inputs, Measurement(measure, parse_accuracies))

    def _build_steps(self, task: Task) -> tuple[Step, Step]:
        """Build the steps that write the data of training and of test."""
        settings, folder = self.settings, self.settings.task_data(task.name)
        family, longest, lengths = settings.family, settings.trained, settings.lengths
        common = dict(task=task.name, family=family, seed=DATA_SEED, version=__version__)
        train = {**common, "longest": longest, "examples": EXAMPLES}
        test = {**common, "lengths": lengths, "examples": TEST_EXAMPLES}
        return (
            Step(
                folder / "train",
                train,
                lambda _: data.write_train_splits(task, family, longest, folder / "train"),
            ),
            Step(
                folder / "read",
                test,
                lambda _: data.write_test_splits(task, family, lengths, folder / "read"),
            ),
        )


def parse_accuracies(lines: list[str]) -> Outputs:
    """Parse the shares of right answers by length from the output of ``fairseq-validate``.

    If the task has depths, there is also an entry for each length and depth, as in ``40@0.25``, and
    that of a length is their mean.
    """
    shares: dict[str, float] = {}
    by_length = defaultdict(list)
    for match in filter(None, map(_ACCURACY.search, lines)):
        length, depth, share = match.groups()
        by_length[length].append(float(share))
        if depth is not None:
            shares[f"{length}@{depth}"] = float(share)
    return {**{length: fmean(at_length) for length, at_length in by_length.items()}, **shares}
