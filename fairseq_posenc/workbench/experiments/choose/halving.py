"""Successive halving: a budget of time spent on candidates, more of it on the better ones.

Source:
    Jamieson and Talwalkar (2016), "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS, arXiv:1502.07943: with n candidates there are ceil(log2 n) rounds of
    equal cost; each trains those that are left further, and keeps the better half of them.
Differs:
    halves are rounded up, so that the last round has two to compare. A candidate is several
    trainings, one with each seed, and is judged by their mean loss. Nobody is dropped while ranks
    mean nothing (:mod:`~fairseq_posenc.workbench.experiments.ranks`). How many updates a round's
    share of the time allows follows from the speed of the round before; the first is short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.corpus import unigram_perplexity
from fairseq_posenc.workbench.experiments.outcomes import Outcome, SeedAggregate, aggregate
from fairseq_posenc.workbench.experiments.ranks import estimate_updates, meaningful_perplexity
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment, TextSettings
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import Outputs, Step
from fairseq_posenc.workbench.running.progress import format_time, say

_FIRST = 20  # updates that measure the speed; they are the beginning of the first round
# a round must train this many times longer than the one before to be worth its start-up
_LEAST = 1.2
# updates after which models of the default size begin to use the order of a text
_BEGIN = 250


class Round(NamedTuple):
    """What came out of a round."""

    before: int  # updates of each training until then
    updates: int  # each training's updates since its beginning
    seconds: float  # the round's duration
    models: list[SeedAggregate]  # all that were in it, from the best on
    unigram: float  # the perplexity of a model that knows only how often each piece occurs

    @property
    def able(self) -> list[SeedAggregate]:
        """Those that did not diverge, and can be read."""
        return [model for model in self.models if not model.diverged and model.has_perplexity]

    @property
    def kept(self) -> list[Variant]:
        """The better half, rounded up, of the able ones; all of these while ranks mean nothing."""
        half = -(-len(self.models) // 2)
        left = self.able[:half] if self.has_meaning else self.able
        return [model.variant for model in left]

    @property
    def has_meaning(self) -> bool:
        """Whether ranks mean something."""
        return bool(self.able) and self.able[0].perplexity.mean <= meaningful_perplexity(
            self.unigram
        )


class Halving:
    """Rounds within a budget of seconds; what is done is not repeated.

    The number of updates in the settings is not used.
    """

    def __init__(self, settings: TextSettings, budget: float, lock: int) -> None:
        self._settings, self._budget, self._lock = settings, budget, lock

    def run(self) -> list[Round]:
        """Run all rounds, the first of which only measures the speed.

        Raises:
            UserError: a wrong text, or a program that failed.
        """
        left, count = self._settings.variants, self._count_rounds()
        rounds = [self._train_round(0, left, 0, _FIRST)]
        for number in range(1, count + 1):
            rest = self._budget - sum(round_.seconds for round_ in rounds)
            updates = self._count_affordable(rounds[-1], len(left), rest / (count + 1 - number))
            before = rounds[-1].updates
            if updates < _LEAST * before:
                say(f"{format_time(max(rest, 0))} left: too little for another round")
                break
            rounds.append(self._train_round(number, left, before, updates))
            left = tuple(rounds[-1].kept)
            if len(left) < 2:
                break
        return rounds

    def estimate_budget(self, rounds: Sequence[Round]) -> Optional[float]:
        """Estimate a budget whose first round trains all candidates until ranks mean something.

        None if all trainings diverged.
        """
        best = rounds[-1].models[0]
        curve = [
            (round_.updates, model.perplexity.mean)
            for round_ in rounds
            for model in round_.models
            if model.variant == best.variant
        ]
        needed = max(estimate_updates(curve, rounds[-1].unigram) or 0, _BEGIN)
        if needed <= rounds[-1].updates:  # it did not fall
            needed = 2 * rounds[-1].updates
        if (costs := self._measure_costs(rounds[-1])) is None:
            return None
        update, overhead = costs
        trainings = len(self._settings.variants) * len(self._settings.seeds)
        round_seconds = trainings * (overhead + needed * update) / self._settings.jobs
        return rounds[0].seconds + self._count_rounds() * round_seconds

    def _count_rounds(self) -> int:
        return max(1, math.ceil(math.log2(len(self._settings.variants))))

    def _count_affordable(self, last: Round, candidates: int, seconds: float) -> int:
        """Compute how many updates in all, at the speed of the last round, fit into a time."""
        if (costs := self._measure_costs(last)) is None:
            return 0
        update, overhead = costs
        share = seconds * self._settings.jobs / (candidates * len(self._settings.seeds))
        return last.updates + int((share - overhead) / update)

    def _measure_costs(self, last: Round) -> Optional[tuple[float, float]]:
        """Measure the seconds of an update, and those of a training beside its updates.

        What a training's own time does not explain is starting up, validating and measuring. None
        if all trainings diverged.
        """
        outcomes = [outcome for model in last.models for outcome in model.undiverged]
        if not outcomes:
            return None
        update = sum(outcome.seconds for outcome in outcomes) / len(outcomes) / last.updates
        started = sum(len(model.outcomes) for model in last.models)
        whole = last.seconds * self._settings.jobs / started
        return update, max(whole - update * (last.updates - last.before), 0)

    def _train_round(
        self, number: int, variants: Sequence[Variant], before: int, updates: int
    ) -> Round:
        """Train to a number of updates and judge."""
        settings = replace(self._settings, variants=tuple(variants))
        inputs = {
            "candidates": [variant.name for variant in variants],
            "updates": updates,
            "text": checksum(settings.text) if settings.text else None,
            "how": [settings.family, settings.seeds, settings.eval_length, settings.vocab_size],
            "options": settings.train_args,
            "version": __version__,
        }
        say(f"round {number}: {len(variants)} encodings, to update {updates:,}")
        longer = replace(settings, updates=updates)
        rounds = settings.out / "rounds"
        facts = Step(rounds / str(number), inputs, lambda place: self._train(longer)).do()
        models = _rank(settings, facts)
        return Round(before, updates, facts["seconds"], models, self._measure_unigram())

    def _measure_unigram(self) -> float:
        data = self._settings.out / "data"
        return unigram_perplexity(data / "train.pieces", data / "valid.pieces")

    def _train(self, settings: TextSettings) -> Outputs:
        began = time.monotonic()
        outcomes = TextExperiment(settings, self._lock).run().outcomes
        rows = [[outcome.perplexity, outcome.seconds, outcome.diverged] for outcome in outcomes]
        seconds = time.monotonic() - began
        if settings.cluster:  # where they also wait; what counts is what they would take here
            seconds = sum(outcome.seconds for outcome in outcomes) / settings.jobs
        return {"seconds": seconds, "outcomes": rows}


def _rank(settings: TextSettings, facts: Outputs) -> list[SeedAggregate]:
    """Sort the models of a round by its figures, from the best on."""
    outcomes = [
        Outcome(run, {"perplexity": perplexity}, seconds=seconds, diverged=diverged)
        for run, (perplexity, seconds, diverged) in zip(settings.runs, facts["outcomes"])
    ]
    return sorted(aggregate(outcomes), key=lambda model: model.sort_key)
