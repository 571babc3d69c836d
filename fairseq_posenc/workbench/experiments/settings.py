"""Settings of an experiment, and its runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.variants import CAUSAL, Variant, refuse_directions
from fairseq_posenc.workbench.running.executor import Slurm

# Options of fairseq-train that the user cannot set, and what to use instead.
RESERVED = {
    "--max-update": "use --updates",
    "--max-epoch": "use --updates",
    "--seed": "use --seeds",
    "--position-encoding": "use --encodings",
    "--attention-directions": "use --encodings",
    "--save-dir": "use --out",
    "--user-dir": "it is set already",
    "--task": "use --family",
    "--log-format": "the learning curves are read from the log",
    "--log-file": "the log is kept already",
}


class Run(NamedTuple):
    """One training of an experiment."""

    variant: Variant  # the model
    seed: int  # of initial weights, order of the data and masks
    case: str  # its learning rate, as the user wrote it; of a probe its task


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(ABC):
    """The user's choices for an experiment."""

    case: ClassVar[str]  # what messages call a run's case
    reserved: ClassVar[Mapping[str, str]] = RESERVED
    out: Path  # folder for all results
    variants: tuple[Variant, ...]  # the models to compare
    seeds: tuple[int, ...]  # one training of each model for each
    updates: int  # training updates of each model
    family: str  # of models
    jobs: int = 1  # trainings at a time
    cluster: Optional[Slurm] = None  # that trains them; None for this machine
    points: int = 10  # validations of a training, so points of its learning curve
    # more options of `fairseq-train`, which override those set here
    train_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.family == CAUSAL:
            refuse_directions(self.variants)
        if self.train_args and not self.train_args[0].startswith("-"):
            raise UserError(f"{self.train_args[0]!r} is not an option; the folder is --out's")
        for argument in self.train_args:
            option = argument.split("=")[0]
            if option in self.reserved:
                instead = self.reserved[option]
                raise UserError(f"-- {argument}: {option} cannot be set here; {instead}")

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
