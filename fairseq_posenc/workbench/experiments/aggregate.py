"""The models of a comparison, each judged over its seeds at its best learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results.differences import compare
from fairseq_posenc.workbench.results.intervals import (
    Interval,
    interval_of_perplexity,
    where_all_have,
)
from fairseq_posenc.workbench.running.logs import Curve


class Outcome(NamedTuple):
    """What came out of one training.

    Attributes:
        contender: the model.
        lr: its learning rate, as the user wrote it.
        seed: of everything random in it.
        curve: its learning curve and speed.
        perplexity: on the validation text; infinite where it cannot be read at that length.
        position_parameters: number of parameters of its position encodings.
        seconds: time of the training.
        diverged: the update at which it did, 0 if it did not; then it has none of the three.
    """

    contender: Variant
    lr: str
    seed: int
    curve: Curve
    perplexity: float = math.nan
    position_parameters: int = 0
    seconds: float = math.nan
    diverged: int = 0


class SeedAggregate(NamedTuple):
    """A model at one learning rate.

    Attributes:
        contender: the model.
        lr: the learning rate.
        outcomes: of all seeds.
    """

    contender: Variant
    lr: str
    outcomes: Sequence[Outcome]

    @property
    def perplexity(self) -> Interval:
        """That at the end."""
        return interval_of_perplexity(outcome.perplexity for outcome in self.outcomes)

    @property
    def by_seed(self) -> dict[int, float]:
        """The same for each seed."""
        return {outcome.seed: outcome.perplexity for outcome in self.outcomes}

    @property
    def diverged(self) -> dict[int, int]:
        """The update at which it did, by the seeds with which it did."""
        return {each.seed: each.diverged for each in self.outcomes if each.diverged}

    def shown(self, digits: int) -> str:
        """Return its perplexity as tables have it, or where it diverged."""
        seeds = [f"{update:,} (seed {seed})" for seed, update in self.diverged.items()]
        if seeds:
            return f"diverged at update {', '.join(seeds)}"
        return self.perplexity.show(digits) if self.is_read else "cannot be read"

    @property
    def is_read(self) -> bool:
        """Whether it can be read at the length at which it is measured."""
        return not math.isinf(self.perplexity.mean)

    @property
    def ended(self) -> list[Outcome]:
        """The outcomes of the trainings that did not diverge."""
        return [each for each in self.outcomes if not each.diverged]

    @property
    def curve(self) -> list[tuple[int, Interval]]:
        """Updates and validation perplexity, where all seeds have one."""
        curves = [outcome.curve.points for outcome in self.outcomes]
        return where_all_have(curves, interval_of_perplexity)

    def arrivals(self, perplexity: float) -> list[Optional[int]]:
        """Return the updates of the first point at or below a perplexity, for each seed."""
        return [outcome.curve.first_below(perplexity) for outcome in self.outcomes]


def aggregate(outcomes: Sequence[Outcome]) -> list[SeedAggregate]:
    """Return each model at the learning rate with the lowest mean loss, in the order given."""
    models = dict.fromkeys(outcome.contender for outcome in outcomes)
    return [_best([each for each in outcomes if each.contender == model]) for model in models]


def _best(outcomes: Sequence[Outcome]) -> SeedAggregate:
    rates = dict.fromkeys(outcome.lr for outcome in outcomes)
    judged = [
        SeedAggregate(outcomes[0].contender, rate, [each for each in outcomes if each.lr == rate])
        for rate in rates
    ]
    # NaN compares as neither less nor more, so one would hide all that come after it.
    return min(judged, key=lambda each: (math.isnan(each.perplexity.mean), each.perplexity.mean))


def is_below(model: SeedAggregate, other: SeedAggregate) -> bool:
    """Whether a model's perplexity is significantly lower than another's."""
    found = compare(model.by_seed, other.by_seed)
    return found.is_significant and found.interval.mean < 0


def name(model: SeedAggregate) -> str:
    """Return what sentences call a model."""
    return f"`{model.contender.name}`"
