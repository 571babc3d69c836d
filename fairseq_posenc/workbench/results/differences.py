"""Compares models that were trained with the same seeds, by paired differences.

All models with the same seed read the same text in the same order, so differences are taken within
each seed, and a paired t-test over the seeds decides whether they are significant. With fewer than
:data:`LEAST_SEEDS` seeds, differences are reported without a test.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Optional

from fairseq_posenc.workbench.results.intervals import LEAST_SEEDS, LEVEL, Interval, interval
from fairseq_posenc.workbench.results.markdown import code, join_codes

Values = Mapping[int, float]  # seed -> value
Pair = tuple[str, str]  # names of the model with the better mean, and of the other
TEST_NOTE = (
    f"Significant: the {LEVEL:.0%} interval of the paired difference (the same seed in both "
    "models, Student's t) does not contain 0."
)


class Scale(NamedTuple):
    """A figure that models are compared by."""

    name: str  # as tables and sentences write it
    apply: Callable[[float], float] = float  # transforms the figure before differences are taken
    higher_is_better: bool = False  # for callers that sort models; differences do not depend on it


PERPLEXITY = Scale("perplexity", math.log)


class PairedDifference(NamedTuple):
    """The paired difference of two models."""

    seeds: int  # number of seeds with a finite figure of both models
    interval: Interval  # difference on the scale: the first minus the other
    p_value: float = math.nan  # of the paired t-test; NaN with too few seeds
    holm: float = math.nan  # p-value corrected for all comparisons (Holm 1979)

    @property
    def is_judged(self) -> bool:
        """Whether there are enough seeds for a test."""
        return self.seeds >= LEAST_SEEDS

    @property
    def is_significant(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.is_judged and not self.interval.low <= 0 <= self.interval.high


def compare(first: Values, other: Values, scale: Scale = PERPLEXITY) -> PairedDifference:
    """Compute the difference ``first - other`` over the seeds with a finite figure of both."""
    shared = first.keys() & other.keys()
    scaled = [(scale.apply(first[seed]), scale.apply(other[seed])) for seed in shared]
    changes = [a - b for a, b in scaled if math.isfinite(a) and math.isfinite(b)]
    mean = interval(changes or [math.nan])
    return PairedDifference(len(changes), mean, _compute_p_value(changes))


def compare_all(samples: Mapping[str, Values]) -> dict[Pair, PairedDifference]:
    """Compare the perplexities of all pairs of models, starting with the pairs of the best one.

    Holm's correction counts all pairs with enough seeds for a test.
    """
    mean_losses = {
        name: statistics.fmean(map(math.log, values.values())) for name, values in samples.items()
    }
    ranked = sorted(samples, key=lambda name: (math.isnan(mean_losses[name]), mean_losses[name]))
    differences = {
        (better, other): compare(samples[better], samples[other])
        for better, other in combinations(ranked, 2)
    }
    judged = [pair for pair, difference in differences.items() if difference.is_judged]
    largest = 0.0  # a corrected p-value is never below that of a smaller p-value
    for rank, pair in enumerate(sorted(judged, key=lambda pair: differences[pair].p_value)):
        corrected = (len(judged) - rank) * differences[pair].p_value
        largest = max(largest, min(1.0, corrected))
        differences[pair] = differences[pair]._replace(holm=largest)
    return differences


def find_different(
    reference: Values, others: Mapping[str, Values], scale: Scale = PERPLEXITY
) -> set[str]:
    """Find the models that differ significantly from a reference.

    The p-values are adjusted for the number of models (Benjamini and Hochberg 1995): at most a
    share of 1 - :data:`LEVEL` of the models found is expected to differ by chance only.
    """
    p_values = {name: compare(values, reference, scale).p_value for name, values in others.items()}
    judged = {name: p_value for name, p_value in p_values.items() if math.isfinite(p_value)}
    if not judged:
        return set()

    from scipy import stats  # takes a second to import

    adjusted = stats.false_discovery_control([*judged.values()])
    return {name for name, p_value in zip(judged, adjusted) if p_value < 1 - LEVEL}


def describe_differences(samples: Mapping[str, Values]) -> list[str]:
    """Write sentences about all differences; those after Holm's correction come last."""
    differences = compare_all(samples)
    judged = [pair for pair in differences if differences[pair].is_judged]
    significant = [pair for pair in judged if differences[pair].is_significant]
    insignificant = [pair for pair in judged if pair not in significant]
    unjudged = [pair for pair in differences if pair not in judged]
    sentences = [
        f"{code(name)} has a significantly lower perplexity than {join_codes(others)}."
        for name, others in _group_by_better(significant).items()
    ]
    if insignificant:
        reason = f"{LEVEL:.0%} interval of the paired difference contains 0"
        pairs = _join_pairs(insignificant)
        sentences.append(f"Not significantly different ({reason}): {pairs}.")
    if unjudged:
        reason = f"fewer than {LEAST_SEEDS} seeds in common"
        sentences.append(f"Not judged, {reason}: {_join_pairs(unjudged)}.")
    if len(judged) > 1 and significant:
        remaining = [pair for pair in significant if differences[pair].holm < 1 - LEVEL]
        listed = f": {_join_pairs(remaining)}" if 0 < len(remaining) < len(significant) else ""
        sentences.append(
            f"After Holm's correction for {len(judged)} comparisons, {len(remaining)} of the "
            f"{len(significant)} significant differences remain significant{listed}."
        )
    return sentences


def explain_few_seeds(seeds: int) -> Optional[str]:
    """Explain that there are too few seeds for a test; None if there are enough."""
    if seeds >= LEAST_SEEDS:
        return None
    return (
        f"{'One seed is' if seeds == 1 else 'Two seeds are'} too few to judge differences: a test "
        f"needs at least {LEAST_SEEDS}. Use `--seeds 1,2,3`."
    )


def _compute_p_value(changes: Sequence[float]) -> float:
    if len(changes) < LEAST_SEEDS:
        return math.nan
    if not statistics.stdev(changes):  # all changes are equal, and the test would divide by 0
        return 0.0 if any(changes) else 1.0

    from scipy import stats  # takes a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns if changes are nearly equal
        return float(stats.ttest_1samp(changes, 0.0).pvalue)


def _group_by_better(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for better, other in pairs:
        groups.setdefault(better, []).append(other)
    return groups


def _join_pairs(pairs: Iterable[Pair]) -> str:
    groups = _group_by_better(pairs).items()
    return "; ".join(f"{code(name)} and {join_codes(others)}" for name, others in groups)
