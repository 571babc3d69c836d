"""The outcomes of a comparison: each model over its seeds, and the conclusions that they allow."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairseq_posenc.errors import counted
from fairseq_posenc.workbench.experiments.trainings import TrainingEnd
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results import intervals
from fairseq_posenc.workbench.results.intervals import LEAST_SAMPLE, LEVEL, Interval, Pair
from fairseq_posenc.workbench.results.markdown import format_number


class Run(NamedTuple):
    """Identifies a training run of a comparison."""

    variant: Variant
    seed: int
    lr: str  # learning rate


class ModelOutcome(NamedTuple):
    """A model at one learning rate, over its finished seeds."""

    variant: Variant
    lr: str
    ends: Mapping[int, TrainingEnd]  # by seed

    @property
    def perplexities(self) -> dict[int, float]:
        """Final perplexity by seed; NaN if the run diverged."""
        return {seed: end.perplexity for seed, end in self.ends.items()}

    @property
    def perplexity(self) -> Interval:
        """Perplexity of the mean loss over the seeds; NaN if one diverged."""
        return intervals.interval_of_perplexity(self.perplexities.values())

    @property
    def undiverged(self) -> list[TrainingEnd]:
        """The ends of the runs that did not diverge."""
        return [end for end in self.ends.values() if not end.diverged_at]

    @property
    def divergence(self) -> str:
        """Where seeds diverged: ``diverged at update 12 (seed 1)``; empty if none did."""
        updates = {seed: end.diverged_at for seed, end in self.ends.items() if end.diverged_at}
        places = ", ".join(f"update {update:,} (seed {seed})" for seed, update in updates.items())
        return f"diverged at {places}" if places else ""

    @property
    def curve(self) -> list[tuple[int, Interval]]:
        """Updates at which all seeds were validated, which may be none, and their perplexity."""
        points = [end.curve.points for end in self.ends.values()]
        return intervals.average_lines(points, intervals.interval_of_perplexity)

    @property
    def still_falls(self) -> bool:
        """Whether perplexity fell by over 2 % in the last quarter; False if a seed diverged."""
        if self.divergence or not self.curve:  # divergence ends a curve early
            return False
        last_update, final = self.curve[-1]
        before = [figure.mean for updates, figure in self.curve if updates <= 0.75 * last_update]
        return bool(before) and final.mean < 0.98 * before[-1]


def rank_models(ends: Mapping[Run, TrainingEnd]) -> list[ModelOutcome]:
    """Rank models by the perplexity at their best learning rate; those that diverged come last."""
    groups: dict[tuple[Variant, str], dict[int, TrainingEnd]] = {}
    for run, end in ends.items():
        groups.setdefault((run.variant, run.lr), {})[run.seed] = end
    outcomes = [ModelOutcome(variant, lr, by_seed) for (variant, lr), by_seed in groups.items()]
    outcomes.sort(key=lambda x: math.inf if x.divergence else x.perplexity.mean)
    at_best_rate: dict[Variant, ModelOutcome] = {}
    for outcome in outcomes:
        at_best_rate.setdefault(outcome.variant, outcome)  # keeps the first, at its best rate
    return list(at_best_rate.values())


def compare_models(models: Sequence[ModelOutcome]) -> dict[Pair, intervals.PairedDifference]:
    """Compare all pairs of models that did not diverge, the better one first."""
    samples = {model.variant.name: model.perplexities for model in models if not model.divergence}
    return intervals.compare_all(samples)


def conclude(models: Sequence[ModelOutcome], unigram: float) -> list[str]:
    """Say which differences survive Holm's correction, or why none can be judged yet.

    Args:
        models: all models, the best first.
        unigram: perplexity of a model that knows only the frequencies of pieces. A model above half
            of it has learned nearly nothing from the order of the text, so its rank means nothing.
    """
    best, lowest, limit = models[0], models[0].perplexity.mean, unigram / 2
    sentences = [f"{x.variant.name} {x.divergence}." for x in models if x.divergence]
    if best.divergence:  # all did, since the best come first
        return sentences
    if lowest > limit:
        ranks = (
            f"Ranks mean nothing yet: the lowest perplexity is {format_number(lowest, 1)} "
            f"({best.variant.name}), and must be below {limit:,.1f}, half the perplexity of a "
            "model that only counts pieces. To continue the runs, give more --updates."
        )
        return [ranks, *sentences]
    few = f"Too few seeds to judge differences: a test needs {LEAST_SAMPLE}, as in --seeds 1,2,3."
    is_tested = min(len(model.ends) for model in models) >= LEAST_SAMPLE
    sentences += _judge(compare_models(models)) if is_tested else [few]
    if falling := ", ".join(model.variant.name for model in models if model.still_falls):
        sentences += [f"Perplexity still falls ({falling}): more --updates may change the order."]
    return sentences


def _judge(pairs: Mapping[Pair, intervals.PairedDifference]) -> list[str]:
    """Say which differences are significant; nothing without pairs."""
    worse: dict[str, list[str]] = {}
    for (better, other), difference in pairs.items():
        if difference.corrected_p_value < 1 - LEVEL:  # 0.05; false for NaN, where there was no test
            worse.setdefault(better, []).append(other)
    test = f"After Holm's correction for {counted(len(pairs), 'comparisons')}"
    found = [f"{better} is better than {', '.join(others)}" for better, others in worse.items()]
    if not found:
        return [f"{test}, no difference is significant."] if pairs else []
    rest = len(pairs) - sum(map(len, worse.values()))
    end = " No other difference is significant." if rest else ""
    return [f"{test}: {'; '.join(found)}.{end}"]
