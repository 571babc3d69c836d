"""Computes means over seeds with confidence intervals, and paired differences, by Student's t.

The figure of a training run that diverged is NaN; the mean is then NaN too, with infinite bounds.

All models with the same seed read the same text in the same order, so differences are taken within
each seed (or each window of a test text), and a paired t-test over the seeds (or windows) decides
whether they are significant. With fewer than :data:`LEAST_SAMPLE`, there is no test.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

from fairseq_posenc.workbench.results.markdown import format_number

LEVEL = 0.95
LEAST_SAMPLE = 3  # seeds or windows for an interval: for two, the factor of Student's t is 12.7
_ROUNDING = 0.0003  # deviation of a difference of losses in nats, as logs round to 0.001 bits
INTERVAL_NOTE = f"Student's t, {LEVEL:.0%}, over {LEAST_SAMPLE} seeds or more"
Values = Mapping[int, float]  # perplexity by seed, or by the number of a window of the text
Pair = tuple[str, str]  # names of the model with the better mean, and of the other


class Interval(NamedTuple):
    """A mean and its interval at ``LEVEL``; infinite for NaN or too few values."""

    mean: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """Whether the bounds are finite."""
        return math.isfinite(self.high - self.low)

    def figures(self, name: str) -> dict[str, float]:
        """Collect the mean and the bounds by name, for a record."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}

    def exp(self) -> "Interval":
        """Compute e to the power of each, at most e^700; infinite bounds stay infinite."""
        return Interval(*(x if math.isinf(x) else math.exp(min(x, 700.0)) for x in self))

    def show(self, digits: int) -> str:
        """Format the mean and, if they are finite, the bounds."""
        mean, low, high = (format_number(x, digits) for x in self)
        return f"{mean} ({low} to {high})" if self.is_bounded else mean


def interval(values: Iterable[float], least_deviation: float = 0.0) -> Interval:
    """Compute the mean of values and its interval, for a deviation of at least the given one."""
    sample = list(values)
    mean = statistics.fmean(sample)
    if len(sample) < LEAST_SAMPLE or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)
    factor = float(stdtrit(len(sample) - 1, (1 + LEVEL) / 2))  # of Student's t distribution
    reach = factor * max(statistics.stdev(sample), least_deviation) / math.sqrt(len(sample))
    return Interval(mean, mean - reach, mean + reach)


def interval_of_perplexity(values: Iterable[float]) -> Interval:
    """Compute the perplexity of the mean loss, with the interval of that perplexity."""
    return interval(map(math.log, values)).exp()


def average_lines(
    lines: Sequence[Sequence[tuple[int, float]]], average: Callable[[Iterable[float]], Interval]
) -> list[tuple[int, Interval]]:
    """Average one line per seed, ``(update, value)`` pairs, at the updates that all lines have.

    ``average`` is one of the functions above, such as :func:`interval`.
    """
    by_seed = [dict(line) for line in lines]
    shared = sorted(set.intersection(*map(set, by_seed)))
    return [(updates, average(values[updates] for values in by_seed)) for updates in shared]


class PairedDifference(NamedTuple):
    """The paired difference of two models."""

    seeds: int  # number of seeds, or windows, with a finite figure of both models
    log_ratio: Interval  # log first - log other: mean over the seeds, with its interval
    p_value: float = math.nan  # of the paired t-test; NaN with too few seeds
    corrected_p_value: float = math.nan  # for the number of comparisons (Holm 1979)


def compare(first: Values, other: Values) -> PairedDifference:
    """Compute ``log first - log other`` over the seeds with a finite perplexity of both."""
    both = first.keys() & other.keys()
    changes = list(filter(math.isfinite, (math.log(first[x]) - math.log(other[x]) for x in both)))
    p_value = math.nan
    if len(changes) >= LEAST_SAMPLE:
        deviation = max(statistics.stdev(changes), _ROUNDING)
        statistic = statistics.fmean(changes) * math.sqrt(len(changes)) / deviation
        p_value = 2 * float(stdtr(len(changes) - 1, -abs(statistic)))  # both tails
    return PairedDifference(len(changes), interval(changes or [math.nan], _ROUNDING), p_value)


def compare_all(samples: Mapping[str, Values]) -> dict[Pair, PairedDifference]:
    """Compare the perplexities of all pairs of models; ``samples`` have the best mean first.

    Holm's correction counts all pairs with enough seeds for a test.
    """
    differences = {(x, y): compare(samples[x], samples[y]) for x, y in combinations(samples, 2)}
    tested = [pair for pair, difference in differences.items() if difference.seeds >= LEAST_SAMPLE]
    largest = 0.0  # a corrected p-value is never below that of a smaller p-value
    for rank, pair in enumerate(sorted(tested, key=lambda pair: differences[pair].p_value)):
        largest = max(largest, min(1.0, (len(tested) - rank) * differences[pair].p_value))
        differences[pair] = differences[pair]._replace(corrected_p_value=largest)
    return differences
