"""Successive halving: divides a budget of time among candidates, with more of it for better ones.

Source:
    Jamieson and Talwalkar (2016), "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS, arXiv:1502.07943: n candidates are trained in ceil(log2 n) rounds of
    equal cost; each round continues the remaining candidates, and keeps the better half.
Differs:
    Halves are rounded up, so that the last round compares two candidates. A candidate is trained
    with several seeds, and judged by their mean loss. No candidate is dropped while ranks mean
    nothing (:mod:`~fairseq_posenc.workbench.experiments.ranks`). The number of updates in a round
    follows from its share of the time and the speed of the previous round; a short first round
    measures the speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, Optional

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.corpus import unigram_perplexity
from fairseq_posenc.workbench.experiments.outcomes import Outcome, SeedAggregate, aggregate
from fairseq_posenc.workbench.experiments.ranks import estimate_updates, meaningful_perplexity
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import Outputs, Step
from fairseq_posenc.workbench.running.progress import format_time, say

_FIRST_UPDATES = 20  # updates of the round that measures the speed; the next one continues them
_MIN_GROWTH = 1.2  # a round that lengthens trainings by less is not worth its start-up
_USEFUL_UPDATES = 250  # after these, models of the default size begin to use the order of a text


class Round(NamedTuple):
    """The results of a round, which continues the trainings of the round before it."""

    before: int  # updates of each training before the round
    updates: int  # updates of each training at its end, those before the round included
    seconds: float  # duration of the round
    models: list[SeedAggregate]  # all models in the round, best first
    unigram: float  # perplexity of a model that knows only the frequencies of pieces

    @property
    def comparable(self) -> list[SeedAggregate]:
        """The models that did not diverge and can read the inputs."""
        return [model for model in self.models if math.isfinite(model.perplexity.mean)]

    @property
    def kept(self) -> list[Variant]:
        """The better half, or all while ranks mean nothing, without incomparable models."""
        count = math.ceil(len(self.models) / 2) if self.has_meaning else len(self.models)
        return [model.variant for model in self.comparable[:count]]

    @property
    def has_meaning(self) -> bool:
        """Whether ranks mean something."""
        level = meaningful_perplexity(self.unigram)
        return bool(self.comparable) and self.comparable[0].perplexity.mean <= level


class TrainingCosts(NamedTuple):
    """The costs of a training in seconds."""

    update: float  # seconds per update
    overhead: float  # seconds for start-up, validation and measurement


class Halving:
    """Trains candidates in rounds within a budget of seconds; finished rounds are not repeated."""

    def __init__(self, experiment: TextExperiment, budget: float, lock: int) -> None:
        self._experiment = experiment
        self._budget = budget
        self._lock = lock  # descriptor of the folder's lock, which all programs inherit

    def run(self) -> list[Round]:
        """Run all rounds, the first of which only measures the speed.

        Raises:
            UserError: the text is unusable, or a program failed.
        """
        candidates = self._experiment.variants
        rounds = [self._train_round(0, candidates, before=0, updates=_FIRST_UPDATES)]
        for rounds_left in range(self._count_rounds(), 0, -1):
            seconds = self._budget - sum(round_.seconds for round_ in rounds)
            updates = self._count_affordable(rounds[-1], len(candidates), seconds / rounds_left)
            before = rounds[-1].updates
            if updates < _MIN_GROWTH * before:
                say(f"{format_time(max(seconds, 0))} left: too little for another round")
                break
            rounds.append(self._train_round(len(rounds), candidates, before, updates))
            candidates = tuple(rounds[-1].kept)
            if len(candidates) < 2:
                break
        return rounds

    def estimate_budget(self, rounds: Sequence[Round]) -> Optional[float]:
        """Estimate the seconds that train all candidates until ranks mean something.

        After round 0, which measures the speed, only round 1 surely trains all; each later round
        gets as much time. None if all trainings diverged.
        """
        last = rounds[-1]
        if (costs := self._measure_costs(last)) is None:
            return None
        curve = [
            (round_.updates, model.perplexity.mean)
            for round_ in rounds
            for model in round_.models
            if model.variant == last.models[0].variant
        ]
        needed = max(estimate_updates(curve, last.unigram) or 0, _USEFUL_UPDATES)
        if needed <= last.updates:  # the curve promised too much: ranks still mean nothing
            needed = 2 * last.updates
        trainings = len(self._experiment.variants) * len(self._experiment.seeds)
        training_seconds = costs.overhead + needed * costs.update
        round_seconds = trainings * training_seconds / self._experiment.jobs
        return rounds[0].seconds + self._count_rounds() * round_seconds

    def _count_rounds(self) -> int:
        return max(1, math.ceil(math.log2(len(self._experiment.variants))))

    def _count_affordable(self, last: Round, candidates: int, seconds: float) -> int:
        """Compute the updates, those so far included, that fit into a time at the last speed."""
        if (costs := self._measure_costs(last)) is None:
            return 0  # all trainings diverged, so the speed is unknown
        trainings = candidates * len(self._experiment.seeds)
        training_seconds = seconds * self._experiment.jobs / trainings
        return last.updates + int((training_seconds - costs.overhead) / costs.update)

    def _measure_costs(self, last: Round) -> Optional[TrainingCosts]:
        """Measure the costs of a training in the last round; None if all trainings diverged."""
        outcomes = [outcome for model in last.models for outcome in model.undiverged]
        if not outcomes:
            return None
        # fairseq's time of a training: in all rounds, without overheads
        seconds = fmean(outcome.seconds for outcome in outcomes)
        update = seconds / last.updates
        trainings = sum(len(model.outcomes) for model in last.models)
        round_seconds = last.seconds * self._experiment.jobs / trainings  # with overheads
        overhead = max(round_seconds - update * (last.updates - last.before), 0)
        return TrainingCosts(update, overhead)

    def _train_round(
        self, number: int, variants: Sequence[Variant], before: int, updates: int
    ) -> Round:
        """Train candidates up to a number of updates, and rank them."""
        experiment = replace(self._experiment, variants=tuple(variants), updates=updates)
        how = [experiment.family, experiment.seeds, experiment.eval_length, experiment.vocab_size]
        inputs = {
            "candidates": [variant.name for variant in variants],
            "updates": updates,
            "text": checksum(experiment.text) if experiment.text else None,
            "how": how,  # a list without names, as in the stamps of earlier versions
            "options": experiment.train_args,
            "version": __version__,
        }
        say(f"round {number}: {len(variants)} encodings, to update {updates:,}")
        folder = experiment.out / "rounds" / str(number)
        facts = Step(folder, inputs, lambda _: self._train(experiment, before)).do()
        outcomes = [  # `_train` lists them in the order of the runs
            Outcome(run, {"perplexity": perplexity}, seconds=seconds, diverged_at=diverged)
            for run, (perplexity, seconds, diverged) in zip(experiment.runs, facts["outcomes"])
        ]
        models = sorted(aggregate(outcomes), key=lambda model: model.sort_key)
        return Round(before, updates, facts["seconds"], models, self._measure_unigram())

    def _measure_unigram(self) -> float:
        """Compute the unigram perplexity of the pieces, which the trainings have prepared."""
        data = self._experiment.out / "data"
        return unigram_perplexity(data / "train.pieces", data / "valid.pieces")

    def _train(self, experiment: TextExperiment, before: int) -> Outputs:
        """Continue all trainings after ``before`` updates; return the duration and all outcomes."""
        began = time.monotonic()
        outcomes = experiment.run(self._lock).outcomes
        rows = [[outcome.perplexity, outcome.seconds, outcome.diverged_at] for outcome in outcomes]
        seconds = time.monotonic() - began
        if experiment.cluster:  # jobs also wait there, so use the time that they would take here
            all_rounds = sum(outcome.seconds for outcome in outcomes if not outcome.diverged_at)
            share_of_round = 1 - before / experiment.updates
            seconds = share_of_round * all_rounds / experiment.jobs
        return {"seconds": seconds, "outcomes": rows}
