"""Successive halving: a budget of time spent on candidates, more of it on the better ones.

Source:
    Jamieson and Talwalkar (2016), "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS, arXiv:1502.07943: with n candidates there are ceil(log2 n) rounds of
    equal cost; each trains those that are left further, and keeps the better half of them.
Differs:
    halves are rounded up, so that the last round has two to compare. A candidate is several
    trainings, one with each seed, and is judged by their mean loss. How many updates a round's
    share of the time allows follows from the speed of the round before; the first is short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.aggregate import Outcome, SeedAggregate
from fairseq_posenc.workbench.experiments.pipeline import Pipeline
from fairseq_posenc.workbench.experiments.settings import Settings
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.logs import Curve
from fairseq_posenc.workbench.running.progress import format_time, say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

_FIRST = 20  # updates that tell the speed; they are the beginning of the first round
_LEAST = 1.2  # times the updates before, for a round to be worth its starts


class Round(NamedTuple):
    """What came out of a round.

    Attributes:
        before: updates of each training until then.
        updates: of each since its beginning.
        seconds: that it took.
        models: all that were in it, from the best on.
    """

    before: int
    updates: int
    seconds: float
    models: list[SeedAggregate]

    @property
    def able(self) -> list[SeedAggregate]:
        """Those that did not diverge, and can be read."""
        return [each for each in self.models if not each.diverged and each.is_read]

    @property
    def kept(self) -> list[Variant]:
        """The better half, rounded up, of the able ones."""
        return [each.contender for each in self.able[: -(-len(self.models) // 2)]]


class Halving:
    """Rounds within a budget; what is done is not repeated.

    Args:
        settings: of the trainings, with all candidates; its number of updates is not used.
        budget: seconds for all.
        jobs: trainings at a time.
        lock: open file that the started programs keep open.
    """

    def __init__(self, settings: Settings, budget: float, jobs: int, lock: int) -> None:
        self._settings, self._budget = settings, budget
        self._jobs, self._lock = jobs, lock

    def run(self) -> list[Round]:
        """Return all rounds, the first of which only tells the speed.

        Raises:
            UserError: a wrong text, or a program that failed.
        """
        left = self._settings.contenders
        count = max(1, math.ceil(math.log2(len(left))))
        rounds = [self._round(0, left, 0, _FIRST)]
        for number in range(1, count + 1):
            rest = self._budget - sum(each.seconds for each in rounds)
            updates = self._affordable(rounds[-1], len(left), rest / (count + 1 - number))
            before = rounds[-1].updates
            if updates < _LEAST * before:
                say(f"{format_time(max(rest, 0))} are left: too little for another round")
                break
            rounds.append(self._round(number, left, before, updates))
            left = tuple(rounds[-1].kept)
            if len(left) < 2:
                break
        return rounds

    def _affordable(self, last: Round, candidates: int, seconds: float) -> int:
        """Return how many updates in all, at the speed of the last round, fit into a time.

        What a training's own time does not explain is starting up, validating and measuring.
        """
        outcomes = [each for model in last.models for each in model.ended]
        if not outcomes:
            return 0
        each = sum(outcome.seconds for outcome in outcomes) / len(outcomes) / last.updates
        started = sum(len(model.outcomes) for model in last.models)
        overhead = max(last.seconds * self._jobs / started - each * (last.updates - last.before), 0)
        own = seconds * self._jobs / (candidates * len(self._settings.seeds))
        return last.updates + int((own - overhead) / each)

    def _round(
        self, number: int, contenders: Sequence[Variant], before: int, updates: int
    ) -> Round:
        """Train to a number of updates and judge."""
        settings = replace(self._settings, contenders=tuple(contenders))
        inputs = {
            "candidates": [each.name for each in contenders],
            "updates": updates,
            "text": checksum(settings.text) if settings.text else None,
            "how": [settings.family, settings.seeds, settings.read, settings.vocab_size],
            "options": settings.train_args,
            "version": __version__,
        }
        say(f"round {number}: {len(contenders)} candidates, to update {updates:,}")
        done = Stage(settings.out / "rounds" / str(number), inputs)
        facts = done.do(lambda: self._train(replace(settings, updates=updates)))
        return Round(before, updates, facts["seconds"], _judged(contenders, settings, facts))

    def _train(self, settings: Settings) -> Outputs:
        began = time.monotonic()
        outcomes = Pipeline(settings, self._jobs, self._lock).run().outcomes
        rows = [[each.perplexity, each.seconds, each.diverged] for each in outcomes]
        return {"seconds": time.monotonic() - began, "outcomes": rows}


def _judged(
    contenders: Sequence[Variant], settings: Settings, facts: Outputs
) -> list[SeedAggregate]:
    """Return the candidates of a round from its figures, from the best on."""
    (lr,) = settings.lrs
    figures = iter(facts["outcomes"])
    outcomes: dict[Variant, list[Outcome]] = {each: [] for each in contenders}
    for seed in settings.seeds:
        for each in contenders:
            perplexity, seconds, diverged = next(figures)
            outcome = Outcome(each, lr, seed, Curve([], 0.0), perplexity, 0, seconds, diverged)
            outcomes[each].append(outcome)
    judged = [SeedAggregate(each, lr, found) for each, found in outcomes.items()]
    return sorted(judged, key=lambda m: (math.isnan(m.perplexity.mean), m.perplexity.mean))
