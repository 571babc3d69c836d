"""An experiment of many small trainings; steps that are done are not repeated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Optional

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import trainings
from fairseq_posenc.workbench.experiments.results import AnySettings, Outcome, Results
from fairseq_posenc.workbench.experiments.settings import Run
from fairseq_posenc.workbench.experiments.trainings import Trial
from fairseq_posenc.workbench.running.executor import refuse_jobs
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.programs import raise_if_failed
from fairseq_posenc.workbench.running.stages import Outputs, Stage

Watch = Callable[[Callable[[], Results[AnySettings]]], None]


class Experiment(ABC, Generic[AnySettings]):
    """Trainings that share their data and differ in variant, seed and case."""

    def __init__(self, settings: AnySettings, lock: int) -> None:
        self.settings, self._lock = settings, lock

    @abstractmethod
    def prepare(self) -> Outputs:
        """Make the data and return its figures."""

    @abstractmethod
    def trial(self, run: Run) -> Trial:
        """Build a training and its measurement; called when the data is there."""

    def run(self, watch: Optional[Watch[AnySettings]] = None) -> Results[AnySettings]:
        """Do all steps and return the figures.

        ``watch`` is called several times a second with a function that reads the results so far.

        Raises:
            UserError: bad data, or a command that failed.
            RunError: trainings that failed on a cluster.
        """
        data = self.prepare()
        trials = {run: self.trial(run) for run in self.settings.runs}

        def results() -> Results[AnySettings]:
            outcomes, begun = _read_outcomes(trials)
            return Results(self.settings, outcomes, data, begun)

        follow = (lambda: watch(results)) if watch else None
        work: list[Trial] = [*trials.values()]
        if cluster := self.settings.cluster:
            items = [*map(trainings.build_work_item, work)]
            raise_if_failed(cluster.run(items, self.settings.out, follow), len(items))
        else:
            refuse_jobs(self.settings.out)
            trainings.run_trials(work, self.settings.jobs, self._lock, follow)
        return results()

    def _build_trial(self, run: Run, data: Stage) -> Trial:
        """Build the trial of a run on data that a stage made."""
        settings = self.settings
        inputs = {
            "data": data.inputs,
            "options": settings.options(run),
            "seed": run.seed,
            "version": __version__,
        }
        stage = Stage(settings.folder(run), inputs, settings.updates)
        return Trial(settings.label(run), stage, trainings.train_command(settings, run))


def _read_outcomes(trials: dict[Run, Trial]) -> tuple[list[Outcome], dict[Run, Curve]]:
    """Read the outcomes of finished trainings, and the curves of those that have begun."""
    outcomes, begun = [], {}
    for run, trial in trials.items():
        figures, log = trainings.finished(trial), trial.stage.folder / trainings.LOG
        if figures is not None:
            seconds, diverged = figures.pop("seconds", math.nan), figures.pop("diverged", 0)
            outcomes.append(Outcome(run, figures, read_curve_file(log), seconds, diverged))
        elif trial.stage.can_continue and log.is_file():
            begun[run] = read_curve_file(log)
    return outcomes, begun
