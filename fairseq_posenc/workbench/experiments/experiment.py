"""An experiment of many small trainings: settings, results, and the steps between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Optional, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import trainings
from fairseq_posenc.workbench.experiments.outcomes import Outcome, SeedAggregate, aggregate
from fairseq_posenc.workbench.experiments.trainings import Measurement, build_job
from fairseq_posenc.workbench.experiments.variants import CAUSAL, Run, Variant, refuse_directions
from fairseq_posenc.workbench.running.executor import LocalMachine, Slurm, run_jobs
from fairseq_posenc.workbench.running.jobs import Inputs, Job, Outputs, RunContext
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, Curve, read_curve_file
from fairseq_posenc.workbench.running.options import build_settings, parse_place

# An interval of epochs that never ends: validation and checkpoints go by updates.
_NEVER = "1000000000"
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


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(ABC):
    """The user's choices for an experiment."""

    case: ClassVar[str]  # what varies beside model and seed, for messages: `task`, say
    reserved: ClassVar[Mapping[str, str]] = RESERVED
    out: Path  # folder for all results
    variants: tuple[Variant, ...]  # the models to compare
    seeds: tuple[int, ...]  # one training of each model for each
    updates: int  # training updates of each model
    family: str  # masked-lm, causal-lm or encoder-decoder
    jobs: int = 1  # trainings at a time
    cluster: Optional[Slurm] = None  # where to train; None for this machine
    points: int = 10  # validations of a training, so points of its learning curve
    # more options of `fairseq-train`, which override those set here
    train_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.family == CAUSAL:
            refuse_directions(self.variants)
        if self.train_args and not self.train_args[0].startswith("-"):
            raise UserError(f"{self.train_args[0]!r} is not an option; set the folder with --out")
        for argument in self.train_args:
            option = argument.split("=")[0]
            if option in self.reserved:
                instead = self.reserved[option]
                raise UserError(f"-- {argument}: {option} cannot be set here; {instead}")

    @classmethod
    def from_args(cls: type[AnySettings], args: Namespace, **computed: Any) -> AnySettings:
        """Build the settings from the options of the same names.

        Args:
            args: the parsed options.
            **computed: settings that are not options.

        Raises:
            UserError: an option has a wrong value.
        """
        shared = {
            "jobs": args.jobs or trainings.default_jobs(),
            "cluster": parse_place(args),
            "train_args": tuple(args.after_dashes),  # the words after `--`
        }
        return build_settings(cls, args, **{**shared, **computed})

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

    def train_command(self, run: Run) -> list[str]:
        """Build the command that trains one model, without ``--user-dir``.

        The training can be continued at each of its validations.
        """
        between = max(1, self.updates // self.points)  # updates from one validation to the next
        begin = f"--max-update {self.updates} --seed {run.seed} --save-dir"
        options = (
            f"--validate-interval-updates {between} --save-interval-updates {between} "
            f"--keep-interval-updates 1 --no-epoch-checkpoints --save-interval {_NEVER} "
            f"--validate-interval {_NEVER} --log-format json --log-interval {min(20, between)} "
            "--num-workers 0 --distributed-world-size 1"
        )
        folders = str(self.data(run)), str(self.folder(run))
        words = ["fairseq-train", folders[0], *begin.split(), folders[1], *options.split()]
        return [*words, *self.options(run)]

    def label(self, run: Run) -> str:
        """Name a training in messages."""
        return f"{run.variant.name}, {self.case} {run.case}, seed {run.seed}"

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [variant.name for variant in self.variants]


AnySettings = TypeVar("AnySettings", bound=ExperimentSettings)


@dataclass(frozen=True)
class Results(Generic[AnySettings]):
    """Everything that came out of an experiment so far."""

    settings: AnySettings  # the user's choices
    outcomes: Sequence[Outcome]  # one for each finished training
    data: Outputs = field(default_factory=dict)  # figures of the data
    # learning curves of the trainings that have begun and are not finished
    begun: Mapping[Run, Curve] = field(default_factory=dict)

    @property
    def models(self) -> list[SeedAggregate]:
        """Each model over its seeds, at its best learning rate, in the user's order."""
        return aggregate(self.outcomes)

    @property
    def missing(self) -> list[Run]:
        """The trainings that are not finished."""
        done = {outcome.run for outcome in self.outcomes}
        return [run for run in self.settings.runs if run not in done]

    def by_seed(self, figure: str, variant: Variant, case: str) -> dict[int, float]:
        """Collect a figure of one model in one case for each seed; 0 where it diverged."""
        return {
            outcome.run.seed: outcome.figures.get(figure, 0.0)
            for outcome in self.outcomes
            if (outcome.run.variant, outcome.run.case) == (variant, case)
        }


class Experiment(ABC, Generic[AnySettings]):
    """Trainings that share their data and differ in variant, seed and case."""

    def __init__(self, settings: AnySettings, lock: int) -> None:
        self.settings, self._place = settings, RunContext(lock)

    @abstractmethod
    def prepare(self) -> Outputs:
        """Make the data and return its figures."""

    @abstractmethod
    def job(self, run: Run) -> Job:
        """Build the job of a training and its measurement; called when the data is there."""

    def run(
        self, watch: Optional[Callable[[Callable[[], Results[AnySettings]]], None]] = None
    ) -> Results[AnySettings]:
        """Do all steps that are not done and return the figures.

        ``watch`` is called several times a second with a function that reads the results so far.

        Raises:
            UserError: bad data, or a command that failed.
            RunError: trainings that failed on a cluster.
        """
        settings, data = self.settings, self.prepare()
        jobs = {run: self.job(run) for run in settings.runs}

        def read_results() -> Results[AnySettings]:
            outcomes, begun = _read_outcomes(jobs)
            return Results(settings, outcomes, data, begun)

        follow = (lambda: watch(read_results)) if watch else None
        # The trainings of a seed are a wave: they end before cores are shared with the next.
        here = LocalMachine(settings.jobs, self._place.lock, wave=len(jobs) // len(settings.seeds))
        run_jobs([*jobs.values()], settings.out, settings.cluster or here, follow)
        return read_results()

    def _build_job(self, run: Run, data: Inputs, measurement: Optional[Measurement] = None) -> Job:
        """Build the job of a run on data that was made from these inputs."""
        settings = self.settings
        inputs = {
            "data": data,
            "options": settings.options(run),
            "seed": run.seed,
            "version": __version__,
        }
        made = settings.label(run), settings.folder(run), inputs, settings.updates
        return build_job(*made, settings.train_command(run), measurement)


def _read_outcomes(jobs: Mapping[Run, Job]) -> tuple[list[Outcome], dict[Run, Curve]]:
    """Read the outcomes of finished trainings, and the curves of those that have begun."""
    outcomes, begun = [], {}
    for run, job in jobs.items():
        figures, log = job.outputs, job.folder / TRAIN_LOG
        if figures is not None:
            seconds, diverged = figures.pop("seconds", math.nan), figures.pop("diverged", 0)
            outcomes.append(Outcome(run, figures, read_curve_file(log), seconds, diverged))
        elif job.steps[0].can_continue and log.is_file():
            begun[run] = read_curve_file(log)
    return outcomes, begun
