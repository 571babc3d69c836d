"""Compares models that were trained with the same seeds, by paired differences.

All models with the same seed read the same text in the same order, so differences are taken within
each seed, and a paired t-test over the seeds decides whether they are significant. With fewer than
:data:`LEAST_SEEDS` seeds, differences are reported without a test.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from fairseq_posenc.workbench.results.intervals import LEAST_SEEDS, Interval, interval

Values = Mapping[int, float]  # seed -> perplexity
Pair = tuple[str, str]  # names of the model with the better mean, and of the other


class PairedDifference(NamedTuple):
    """The paired difference of two models."""

    seeds: int  # number of seeds with a finite figure of both models
    interval: Interval  # difference of the logarithms: the first minus the other
    p_value: float = math.nan  # of the paired t-test; NaN with too few seeds
    holm: float = math.nan  # p-value corrected for all comparisons (Holm 1979)


def compare(first: Values, other: Values) -> PairedDifference:
    """Compute ``log first - log other`` over the seeds with a finite perplexity of both."""
    shared = first.keys() & other.keys()
    scaled = [(math.log(first[seed]), math.log(other[seed])) for seed in shared]
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
    judged = [pair for pair, difference in differences.items() if difference.seeds >= LEAST_SEEDS]
    largest = 0.0  # a corrected p-value is never below that of a smaller p-value
    for rank, pair in enumerate(sorted(judged, key=lambda pair: differences[pair].p_value)):
        corrected = (len(judged) - rank) * differences[pair].p_value
        largest = max(largest, min(1.0, corrected))
        differences[pair] = differences[pair]._replace(holm=largest)
    return differences


def _compute_p_value(changes: Sequence[float]) -> float:
    if len(changes) < LEAST_SEEDS:
        return math.nan
    if not statistics.stdev(changes):  # all changes are equal, and the test would divide by 0
        return 0.0 if any(changes) else 1.0

    from scipy import stats  # takes a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns if changes are nearly equal
        return float(stats.ttest_1samp(changes, 0.0).pvalue)
