"""Settings of an experiment, and its runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

from fairseq_posenc.workbench.experiments.variants import CAUSAL, Variant, refuse_directions
from fairseq_posenc.workbench.running.executor import Slurm


class Run(NamedTuple):
    """One training of an experiment."""

    variant: Variant  # the model
    seed: int  # of initial weights, order of the data and masks
    case: str  # its learning rate, as the user wrote it; of a probe its task


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(ABC):
    """The user's choices for an experiment."""

    case: ClassVar[str]  # what messages call a run's case
    out: Path  # folder for all results
    variants: tuple[Variant, ...]  # the models to compare
    seeds: tuple[int, ...]  # one training of each model for each
    updates: int  # training updates of each model
    family: str  # of models
    jobs: int = 1  # trainings at a time
    cluster: Optional[Slurm] = None  # that trains them; None for this machine
    points: int = 10  # validations of a training, so points of its learning curve

    def __post_init__(self) -> None:
        if self.family == CAUSAL:
            refuse_directions(self.variants)

    @property
    @abstractmethod
    def runs(self) -> list[Run]:
        """The trainings, seed after seed, so that an early end leaves whole seeds."""

    @abstractmethod
    def folder(self, run: Run) -> Path:
        """Name the folder of a model's checkpoints and log."""

    @abstractmethod
    def data(self, run: Run) -> Path:
        """Name the data-bin that a model is trained on."""

    @abstractmethod
    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns."""

    def label(self, run: Run) -> str:
        """Name a training in messages."""
        return f"{run.variant.name}, {self.case} {run.case}, seed {run.seed}"

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [variant.name for variant in self.variants]

    @property
    def validate_every(self) -> int:
        """Updates between two points of a learning curve."""
        return max(1, self.updates // self.points)
