"""The results of trainings: outcomes of single trainings, and aggregates over the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fairseq_posenc.workbench.experiments.variants import Run, Variant
from fairseq_posenc.workbench.results import intervals
from fairseq_posenc.workbench.results.intervals import Interval
from fairseq_posenc.workbench.running.jobs import Outputs
from fairseq_posenc.workbench.running.logs import Curve


class Outcome(NamedTuple):
    """The results of a training."""

    run: Run  # the training
    # Outputs of the job by name: `position_parameters` and, if an evaluation follows the training,
    # its `perplexity` (infinite if the model cannot read texts of the length of the evaluation), or
    # its shares of right answers by length. A training that diverged has none of these figures.
    figures: Outputs
    curve: Curve = Curve([], 0.0)  # learning curve and speed
    seconds: float = math.nan  # duration of the training; NaN if it diverged
    diverged_at: int = 0  # update at which it diverged; 0 if it did not

    @property
    def perplexity(self) -> float:
        """Perplexity of the evaluation, else of the last validation; NaN if it diverged."""
        if self.diverged_at:
            return math.nan
        if "perplexity" in self.figures:
            return self.figures["perplexity"]
        return self.curve.entries[-1].perplexity


class SeedAggregate(NamedTuple):
    """A model at one learning rate, with all of its seeds."""

    outcomes: Sequence[Outcome]

    @property
    def variant(self) -> Variant:
        """The model."""
        return self.outcomes[0].run.variant

    @property
    def lr(self) -> str:
        """The learning rate, which is the condition of a text experiment."""
        return self.outcomes[0].run.condition

    @property
    def perplexity(self) -> Interval:
        """Final perplexity over the seeds."""
        return intervals.interval_of_perplexity(outcome.perplexity for outcome in self.outcomes)

    @property
    def perplexity_by_seed(self) -> dict[int, float]:
        """Final perplexity by seed."""
        return {outcome.run.seed: outcome.perplexity for outcome in self.outcomes}

    @property
    def sort_key(self) -> tuple[bool, float]:
        """A key that sorts models by perplexity, the best first and NaN last."""
        return math.isnan(self.perplexity.mean), self.perplexity.mean

    @property
    def divergences(self) -> dict[int, int]:
        """The update at which the training diverged, by seed; empty if no training diverged."""
        ends = {outcome.run.seed: outcome.diverged_at for outcome in self.outcomes}
        return {seed: update for seed, update in ends.items() if update}

    def show(self, digits: int) -> str:
        """Format the perplexity, or the updates at which the model diverged, for a table."""
        updates = [f"{update:,} (seed {seed})" for seed, update in self.divergences.items()]
        if updates:
            return f"diverged at update {', '.join(updates)}"
        perplexity = self.perplexity  # infinite if the model cannot read texts of this length
        return "cannot be read" if math.isinf(perplexity.mean) else perplexity.show(digits)

    @property
    def undiverged(self) -> list[Outcome]:
        """The outcomes of the trainings that did not diverge."""
        return [outcome for outcome in self.outcomes if not outcome.diverged_at]

    @property
    def curve(self) -> list[tuple[int, Interval]]:
        """Updates at which all seeds were validated, and the perplexity over the seeds."""
        curves = [outcome.curve.points for outcome in self.outcomes]
        return intervals.average_lines(curves, intervals.interval_of_perplexity)


def aggregate(outcomes: Sequence[Outcome]) -> list[SeedAggregate]:
    """Aggregate each model over its seeds, at the learning rate with the lowest mean loss."""
    by_variant: dict[Variant, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        by_lr = by_variant.setdefault(outcome.run.variant, {})
        by_lr.setdefault(outcome.run.condition, []).append(outcome)
    return [
        min(map(SeedAggregate, by_lr.values()), key=lambda model: model.sort_key)
        for by_lr in by_variant.values()
    ]
