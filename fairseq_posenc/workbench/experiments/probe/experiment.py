"""The experiment of ``probe``: writes the data of each task, trains models on it, tests them.

Lengths count words of a question, as each task defines them.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.experiment import Experiment, Results
from fairseq_posenc.workbench.experiments.probe import data as probe_data
from fairseq_posenc.workbench.experiments.probe.data import ANSWER, QUESTION
from fairseq_posenc.workbench.experiments.probe.tasks.base import Task
from fairseq_posenc.workbench.experiments.trainings import Evaluation
from fairseq_posenc.workbench.experiments.variants import CAUSAL, ENCODER_DECODER, MASKED, Run
from fairseq_posenc.workbench.running.jobs import Job, Outputs, RunContext, Step
from fairseq_posenc.workbench.running.progress import say

_MAX_WORDS = 500  # most words of a question
_POSITIONS = 1024  # most tokens of a sample: an answer may be as long as its question

# By default fairseq cuts the last batch to a multiple of 8 and drops the rest, in validation too.
_BATCHES = "--max-tokens 4096 --required-batch-size-multiple 1"
# Small enough that a training takes at most two minutes on a core, large enough to learn the tasks
# at the lengths trained on. Without the last option, a resumed training draws other batches.
_COMMON = f"""
--criterion answers {_BATCHES} --dropout 0 --attention-dropout 0
--max-target-positions {_POSITIONS} --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0
--lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 100 --update-epoch-batch-itr True
"""
# fairseq's options by family. An encoder is not trained with random masks: its targets are its own
# inputs (--self-target), in which the criterion ``answers`` replaces each word of an answer by a
# blank.
_TASK_OPTIONS = {
    MASKED: "--task language_modeling --self-target",
    CAUSAL: "--task language_modeling",
    ENCODER_DECODER: f"--task translation --source-lang {QUESTION} --target-lang {ANSWER}",
}
_SAMPLES = f"--sample-break-mode eos --tokens-per-sample {_POSITIONS}"
_MODELS = {  # without positions; each variant adds its own by --position-encoding
    MASKED: f"--arch roberta_none_tiny {_SAMPLES} --encoder-ffn-embed-dim 256",
    CAUSAL: f"--arch transformer_lm_none_tiny {_SAMPLES} --decoder-ffn-embed-dim 256",
    ENCODER_DECODER: f"--arch transformer_none_tiny --max-source-positions {_POSITIONS} "
    "--encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256",
}
TRAIN_OPTIONS = {
    family: shlex.split(f"{_TASK_OPTIONS[family]} {model} {_COMMON}")
    for family, model in _MODELS.items()
}
# The figure of a test split, as in "length-40-depth-0.25_exact": "0.97", or without a depth.
_ACCURACY = re.compile(r'"length-(\d+)(?:-depth-([\d.]+))?_exact": "?([\d.]+)')


@dataclass(frozen=True, kw_only=True)
class TaskExperiment(Experiment):
    """Models, each of which learns a task and is tested at many lengths."""

    condition_name: ClassVar[str] = "task"
    tasks: tuple[Task, ...]  # the tasks; each model is trained on one
    trained: int  # longest question in training, in words
    lengths: tuple[int, ...]  # lengths of the test questions, in words

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in (("--trained", self.trained), ("--lengths", max(self.lengths))):
            if value > _MAX_WORDS:
                raise UserError(f"{option} {value}: must be at most {_MAX_WORDS:,}")

    @property
    def runs(self) -> list[Run]:
        """The trainings: every model on every task, with every seed."""
        pairs = [(task, variant) for task in self.tasks for variant in self.variants]
        return [Run(variant, seed, task.name) for seed in self.seeds for task, variant in pairs]

    def folder(self, run: Run) -> Path:
        """Return the folder of a run's checkpoints and log."""
        models = self.out / self.family / "models" / run.condition
        return models / run.variant.folder / f"seed-{run.seed}"

    def data_folder(self, run: Run) -> Path:
        """Return the data-bin of a run's task."""
        return self.out / self.family / "data" / run.condition / "train"

    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns."""
        return [*TRAIN_OPTIONS[self.family], *run.variant.options, *self.train_args]

    @property
    def within(self) -> list[int]:
        """Test lengths up to the longest in training."""
        return [length for length in self.lengths if length <= self.trained]

    @property
    def beyond(self) -> list[int]:
        """Test lengths beyond the longest in training."""
        return [length for length in self.lengths if length > self.trained]

    def prepare(self, context: RunContext) -> Outputs:
        """Write the data of all tasks; reports need no figures of them."""
        say(f"data: {', '.join(task.name for task in self.tasks)}")
        for task in self.tasks:
            for step in self._build_steps(task):
                step.do(context)
        return {}

    def job(self, run: Run) -> Job:
        """Build a training on one task, and its test at all lengths."""
        (task,) = (task for task in self.tasks if task.name == run.condition)
        train, test = self._build_steps(task)
        splits = ",".join(probe_data.plan_test_splits(task, self.lengths))
        options = (
            f"{_TASK_OPTIONS[self.family]} --valid-subset {splits} {_BATCHES} --log-format json "
            "--num-workers 0 --distributed-world-size 1"
        )
        model = str(self.folder(run) / LAST)
        command = ["fairseq-validate", str(test.folder), "--path", model, *shlex.split(options)]
        # Other test lengths change only the command: the training need not be repeated.
        return self._build_job(run, train.inputs, Evaluation(command, parse_accuracies))

    def _build_steps(self, task: Task) -> tuple[Step, Step]:
        """Build the steps that write the data of training and of test."""
        folder = self.out / self.family / "data" / task.name
        train, test = folder / "train", folder / "read"  # as earlier versions named them
        inputs = {  # the data are written again if one of these changes
            "task": task.name,
            "family": self.family,
            "seed": probe_data.DATA_SEED,
            "version": __version__,
        }
        return (
            Step(
                train,
                {**inputs, "longest": self.trained, "examples": probe_data.EXAMPLES},
                lambda _: probe_data.write_train_splits(task, self.family, self.trained, train),
            ),
            Step(
                test,
                {**inputs, "lengths": self.lengths, "examples": probe_data.TEST_EXAMPLES},
                lambda _: probe_data.write_test_splits(task, self.family, self.lengths, test),
            ),
        )


TaskResults = Results[TaskExperiment]


def parse_accuracies(lines: list[str]) -> Outputs:
    """Parse the shares of right answers by length from the output of ``fairseq-validate``.

    If the task has depths, the share of a length is the mean over depths, and there is also a share
    for each length and depth, named as in ``40@0.25``.
    """
    of_depths: dict[str, float] = {}
    by_length = defaultdict(list)
    for line in lines:
        if match := _ACCURACY.search(line):
            length, depth, share = match.groups()
            by_length[length].append(float(share))
            if depth is not None:
                of_depths[f"{length}@{depth}"] = float(share)
    return {length: fmean(shares) for length, shares in by_length.items()} | of_depths
