"""The models of a comparison, each judged over its seeds at its best learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from fairseq_posenc.reporting.intervals import Interval, interval_of_perplexity
from fairseq_posenc.running.contenders import Contender
from fairseq_posenc.running.logs import Curve


class Outcome(NamedTuple):
    """What came out of one training.

    Attributes:
        contender: the model.
        lr: its learning rate, as the user wrote it.
        seed: of everything random in it.
        curve: its learning curve and speed.
        perplexity: on the validation text, by ``fairseq-validate``.
        position_parameters: number of parameters of its position encodings.
        seconds: time of the training.
    """

    contender: Contender
    lr: str
    seed: int
    curve: Curve
    perplexity: float
    position_parameters: int
    seconds: float


class Judged(NamedTuple):
    """A model at one learning rate.

    Attributes:
        contender: the model.
        lr: the learning rate.
        outcomes: of all seeds.
    """

    contender: Contender
    lr: str
    outcomes: Sequence[Outcome]

    @property
    def perplexity(self) -> Interval:
        """That at the end."""
        return interval_of_perplexity(outcome.perplexity for outcome in self.outcomes)

    @property
    def curve(self) -> list[tuple[int, Interval]]:
        """Updates and validation perplexity, where all seeds have one."""
        curves = [dict(outcome.curve.points) for outcome in self.outcomes]
        shared = sorted(set.intersection(*map(set, curves)))
        return [(at, interval_of_perplexity(points[at] for points in curves)) for at in shared]

    def arrivals(self, perplexity: float) -> list[Optional[int]]:
        """Return the updates of the first point at or below a perplexity, for each seed."""
        return [outcome.curve.first_below(perplexity) for outcome in self.outcomes]


def judge(outcomes: Sequence[Outcome]) -> list[Judged]:
    """Return each model at the learning rate with the lowest mean loss, in the order given."""
    models = dict.fromkeys(outcome.contender for outcome in outcomes)
    return [_best([each for each in outcomes if each.contender == model]) for model in models]


def _best(outcomes: Sequence[Outcome]) -> Judged:
    rates = dict.fromkeys(outcome.lr for outcome in outcomes)
    judged = [
        Judged(outcomes[0].contender, rate, [each for each in outcomes if each.lr == rate])
        for rate in rates
    ]
    # NaN compares as neither less nor more, so one would hide all that come after it.
    return min(judged, key=lambda each: (math.isnan(each.perplexity.mean), each.perplexity.mean))
