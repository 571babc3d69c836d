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
from fairseq_posenc.workbench.experiments.trials import Trial
from fairseq_posenc.workbench.experiments.variants import Run
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

_ACCURACY = re.compile(r'"length-(\d+)(?:-depth-([\d.]+))?_exact": "?([\d.]+)')


class TaskExperiment(Experiment[TaskSettings]):
    """Models that are each trained on one task and tested at many lengths."""

    def prepare(self) -> Outputs:
        """Write the data of all tasks, questions and answers."""
        settings = self.settings
        say(f"data: {', '.join(task.name for task in settings.tasks)}")
        for task in settings.tasks:
            self._write(task, *self._stages(task.name))
        return {}

    def _write(self, task: Task, train: Stage, test: Stage) -> None:
        settings, family = self.settings, self.settings.family
        train.do(lambda: data.write_train_splits(task, family, settings.trained, train.folder))
        test.do(lambda: data.write_test_splits(task, family, settings.lengths, test.folder))

    def trial(self, run: Run) -> Trial:
        """Build a training on one task, and its test at all lengths."""
        settings, (train, test) = self.settings, self._stages(run.case)
        splits = ",".join(data.name_test_splits(tasks.get(run.case), settings.lengths))
        options = (
            f"{TASKS[settings.family]} --valid-subset {splits} {KEEP_ALL} --log-format json "
            "--num-workers 0 --distributed-world-size 1"
        )
        model = str(settings.folder(run) / LAST)
        measure = ["fairseq-validate", str(test.folder), "--path", model, *options.split()]
        return self._build_trial(run, train)._replace(
            measure=measure, parse_figures=parse_accuracies
        )

    def _stages(self, task: str) -> tuple[Stage, Stage]:
        """Build the stages that write the data of training and of test."""
        settings, folder = self.settings, self.settings.task_data(task)
        common = dict(task=task, family=settings.family, seed=DATA_SEED, version=__version__)
        train = {**common, "longest": settings.trained, "examples": EXAMPLES}
        test = {**common, "lengths": settings.lengths, "examples": TEST_EXAMPLES}
        return Stage(folder / "train", train), Stage(folder / "read", test)


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
