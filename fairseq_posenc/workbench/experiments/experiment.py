"""The base class of experiments with many small trainings, and the class of their results.

A command builds an experiment from the user's options and calls :meth:`Experiment.run`, which
trains a model for each of ``runs``, in a folder of its own, and returns the :class:`Results`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Optional, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import trainings
from fairseq_posenc.workbench.experiments.outcomes import Outcome, SeedAggregate, aggregate
from fairseq_posenc.workbench.experiments.trainings import Evaluation, Training
from fairseq_posenc.workbench.experiments.variants import CAUSAL, Run, Variant
from fairseq_posenc.workbench.running.executor import Slurm
from fairseq_posenc.workbench.running.jobs import Inputs, Job, Outputs, RunContext
from fairseq_posenc.workbench.running.local_machine import LocalMachine
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, Curve, read_curve_file
from fairseq_posenc.workbench.running.options import build_settings, parse_cluster

if TYPE_CHECKING:
    from typing_extensions import Self

# Epochs between two validations or checkpoints: these are made at intervals of updates instead.
_NEVER = "1000000000"
# Options of fairseq-train that the user cannot set, with the alternative or the reason.
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
class Experiment(ABC):
    """Trainings that differ in variant, seed, and learning rate or task, as the user chose."""

    condition_name: ClassVar[str]  # the meaning of `Run.condition`: `learning rate` or `task`
    reserved: ClassVar[Mapping[str, str]] = RESERVED
    out: Path  # folder of all results
    variants: tuple[Variant, ...]  # models to compare, of `--encodings`
    seeds: tuple[int, ...]  # random seeds; every model is trained with each
    updates: int  # training updates of each model
    family: str  # one of `variants.FAMILIES`, which are the choices of `--family`
    jobs: int = 1  # number of trainings at a time
    cluster: Optional[Slurm] = None  # cluster to train on; None for this machine
    points: int = 10  # number of validations in a training: points of its learning curve
    train_args: tuple[str, ...] = ()  # further options of `fairseq-train`; see `options`

    def __post_init__(self) -> None:
        for variant in self.variants:
            if variant.directions and self.family == CAUSAL:
                raise UserError(
                    f"--encodings: {variant.name!r} has attention directions, which are for "
                    "encoders; a causal LM attends from left to right only"
                )
        # A first word without a dash is not an option; it may be meant as fairseq's data folder.
        if self.train_args and not self.train_args[0].startswith("-"):
            raise UserError(f"{self.train_args[0]!r} is not an option; set the folder with --out")

    @classmethod
    def from_args(cls, args: Namespace, **computed: Any) -> Self:
        """Build the experiment from options with the names of its fields, and ``computed`` fields.

        A computed field replaces the option with its name.

        Raises:
            UserError: an option has a wrong value, or is reserved.
        """
        for argument in args.after_dashes:
            option = argument.split("=")[0]
            if option in cls.reserved:
                advice = cls.reserved[option]
                raise UserError(f"-- {argument}: {option} cannot be set here; {advice}")
        computed.setdefault("jobs", args.jobs or trainings.default_jobs())
        computed.setdefault("train_args", tuple(args.after_dashes))  # the words after `--`
        return build_settings(cls, args, cluster=parse_cluster(args), **computed)

    @property
    @abstractmethod
    def runs(self) -> list[Run]:
        """The trainings, seed by seed, so that an interruption leaves complete seeds."""

    @abstractmethod
    def folder(self, run: Run) -> Path:
        """Return the folder of a run's checkpoints and log."""

    @abstractmethod
    def data_folder(self, run: Run) -> Path:
        """Return the data-bin that a run is trained on."""

    @abstractmethod
    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns.

        They include ``train_args``, after those options that the user may override.
        """

    def train_command(self, run: Run) -> list[str]:
        """Build the command that trains a model, without ``--user-dir``.

        The training saves a checkpoint, from which it can resume, at every validation.
        """
        interval = max(1, self.updates // self.points)
        options = (
            f"--max-update {self.updates} --seed {run.seed} "
            f"--validate-interval-updates {interval} --save-interval-updates {interval} "
            f"--keep-interval-updates 1 --no-epoch-checkpoints --save-interval {_NEVER} "
            f"--validate-interval {_NEVER} --log-format json --log-interval {min(20, interval)} "
            "--num-workers 0 --distributed-world-size 1"
        )
        folders = [str(self.data_folder(run)), "--save-dir", str(self.folder(run))]
        return ["fairseq-train", *folders, *options.split(), *self.options(run)]

    def label(self, run: Run) -> str:
        """Name a training in messages."""
        return f"{run.variant.name}, {self.condition_name} {run.condition}, seed {run.seed}"

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [variant.name for variant in self.variants]

    @abstractmethod
    def prepare(self, context: RunContext) -> Outputs:
        """Make the data, and return figures of it, such as numbers of words."""

    @abstractmethod
    def job(self, run: Run) -> Job:
        """Build the job of a training and its evaluation, by :meth:`_build_job`.

        It is called after :meth:`prepare`.
        """

    def run(
        self, lock: int, watch: Optional[Callable[[Callable[[], Results[Self]]], None]] = None
    ) -> Results[Self]:
        """Do all steps that are not done, and return the results.

        All programs inherit the descriptor of the folder's ``lock``. ``watch`` is called several
        times a second with a function that reads the results so far, which takes time, so ``watch``
        should call the function only to show them.

        Raises:
            UserError: bad data, or a command failed.
            RunError: trainings failed on a cluster.
        """
        data_figures = self.prepare(RunContext(lock))
        jobs = {run: self.job(run) for run in self.runs}

        def read_results() -> Results[Self]:
            outcomes, begun = _read_outcomes(jobs)
            return Results(self, outcomes, data_figures, begun)

        # `runs` go seed by seed, and those of a seed are a wave: while one of them is not finished,
        # those of later seeds start on free cores only.
        runs_per_seed = len(jobs) // len(self.seeds)
        machine = self.cluster or LocalMachine(self.jobs, lock, wave=runs_per_seed)
        follow = partial(watch, read_results) if watch else None
        machine.run([*jobs.values()], self.out, follow)
        return read_results()

    def _build_job(
        self, run: Run, data_inputs: Inputs, evaluation: Optional[Evaluation] = None
    ) -> Job:
        """Build the job of a run, whose data were made from ``data_inputs``."""
        inputs = {
            "data": data_inputs,
            "options": self.options(run),
            "seed": run.seed,
            "version": __version__,
        }
        training = Training(
            label=self.label(run),
            folder=self.folder(run),
            inputs=inputs,
            updates=self.updates,
            command=self.train_command(run),
            evaluation=evaluation,
        )
        return training.build_job()


ExperimentT_co = TypeVar("ExperimentT_co", bound=Experiment, covariant=True)


@dataclass(frozen=True)
class Results(Generic[ExperimentT_co]):
    """The results of an experiment so far."""

    experiment: ExperimentT_co  # the user's choices
    outcomes: Sequence[Outcome]  # outcomes of the finished trainings
    data_figures: Outputs = field(default_factory=dict)  # result of `Experiment.prepare`
    begun: Mapping[Run, Curve] = field(default_factory=dict)  # curves of unfinished trainings

    @property
    def models(self) -> list[SeedAggregate]:
        """All models over their seeds, each at its best learning rate, in the user's order."""
        return aggregate(self.outcomes)

    @property
    def missing(self) -> list[Run]:
        """The trainings that are not finished."""
        finished = {outcome.run for outcome in self.outcomes}
        return [run for run in self.experiment.runs if run not in finished]


def _read_outcomes(jobs: Mapping[Run, Job]) -> tuple[list[Outcome], dict[Run, Curve]]:
    """Read the outcomes of finished trainings, and the curves of unfinished ones."""
    outcomes, begun = [], {}
    for run, job in jobs.items():
        training = job.steps[0]  # an evaluation, if any, is the second step
        log = job.folder / TRAIN_LOG
        if (figures := job.outputs) is not None:
            # If a training diverges, only its update is in the figures.
            seconds, diverged = figures.get("seconds", math.nan), figures.get("diverged", 0)
            outcomes.append(Outcome(run, figures, read_curve_file(log), seconds, diverged))
        elif training.can_continue and log.is_file():  # else the log is of other options
            begun[run] = read_curve_file(log)
    return outcomes, begun
