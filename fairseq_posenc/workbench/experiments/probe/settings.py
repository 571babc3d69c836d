"""Settings of ``probe``: the user's choices and the sizes of its models."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.experiment import ExperimentSettings
from fairseq_posenc.workbench.experiments.probe.data import ANSWER, QUESTION
from fairseq_posenc.workbench.experiments.probe.tasks.base import Task
from fairseq_posenc.workbench.experiments.variants import BOTH, CAUSAL, MASKED, Run

POSITIONS = 1024  # rows of learned tables: at most two questions of LONGEST words, and </s>
LONGEST = 500

# By default fairseq cuts the last batch to a multiple of 8 and drops the rest, in validation too.
KEEP_ALL = "--max-tokens 4096 --required-batch-size-multiple 1"
# Small enough that a training takes at most two minutes on a core, large enough to learn the tasks
# at the lengths trained on.
# A resumed training draws other batches without --update-epoch-batch-itr.
_COMMON = f"""
--criterion answers {KEEP_ALL} --dropout 0 --attention-dropout 0
--max-target-positions {POSITIONS} --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0
--lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 100 --update-epoch-batch-itr True
"""
TASKS = {
    MASKED: "--task language_modeling --self-target",
    CAUSAL: "--task language_modeling",
    BOTH: f"--task translation --source-lang {QUESTION} --target-lang {ANSWER}",
}
_SAMPLES = f"--sample-break-mode eos --tokens-per-sample {POSITIONS}"
_MODELS = {
    MASKED: f"--arch roberta_none_tiny {_SAMPLES} --encoder-ffn-embed-dim 256",
    CAUSAL: f"--arch transformer_lm_none_tiny {_SAMPLES} --decoder-ffn-embed-dim 256",
    BOTH: f"--arch transformer_none_tiny --max-source-positions {POSITIONS} "
    "--encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256",
}
TRAIN_OPTIONS = {
    family: shlex.split(f"{TASKS[family]} {model} {_COMMON}") for family, model in _MODELS.items()
}


@dataclass(frozen=True, kw_only=True)
class TaskSettings(ExperimentSettings):
    """The user's choices for models that learn tasks with known answers.

    Attributes:
        tasks: the tasks; a model is trained on one.
        trained: longest question in training, in words.
        lengths: lengths of the test questions, in words.
    """

    case: ClassVar[str] = "task"
    points: int = 10
    tasks: tuple[Task, ...]
    trained: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in (("--trained", self.trained), ("--lengths", max(self.lengths))):
            if value > LONGEST:
                raise UserError(f"{option} {value}: must be at most {LONGEST:,}")

    @property
    def runs(self) -> list[Run]:
        """The trainings, each model on each task."""
        pairs = [(task, variant) for task in self.tasks for variant in self.variants]
        return [Run(variant, seed, task.name) for seed in self.seeds for task, variant in pairs]

    def folder(self, run: Run) -> Path:
        """Name the folder of a model's checkpoints and log."""
        models = self.out / self.family / "models"
        return models / run.case / run.variant.folder / f"seed-{run.seed}"

    def task_data(self, task: str) -> Path:
        """Name the folder of a task's training and test data."""
        return self.out / self.family / "data" / task

    def data(self, run: Run) -> Path:
        """Name the data-bin of a model's task."""
        return self.task_data(run.case) / "train"

    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns."""
        return [*TRAIN_OPTIONS[self.family], *run.variant.options, *self.train_args]

    @property
    def within(self) -> list[int]:
        """The test lengths that were trained on."""
        return [length for length in self.lengths if length <= self.trained]

    @property
    def beyond(self) -> list[int]:
        """The test lengths beyond those of training."""
        return [length for length in self.lengths if length > self.trained]
