"""Computes means over seeds with confidence intervals, by Student's t.

The figure of a training that diverged is NaN; the mean is then NaN too, with infinite bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

LEVEL = 0.95
LEAST_SEEDS = 3  # fewest seeds for an interval: for two, the factor of Student's t is 12.7
INTERVAL_NOTE = f"Student's t, {LEVEL:.0%}, over the seeds"


class Interval(NamedTuple):
    """A mean and its interval at ``LEVEL``; infinite for fewer than ``LEAST_SEEDS`` values."""

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

    def show(self, digits: int) -> str:
        """Format the mean and, if they are finite, the bounds."""
        mean = f"{self.mean:,.{digits}f}"
        if not self.is_bounded:
            return mean
        return f"{mean} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def interval(values: Iterable[float]) -> Interval:
    """Compute the mean of some values with its interval."""
    sample = list(values)
    mean = statistics.fmean(sample)
    if len(sample) < LEAST_SEEDS or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)

    from scipy import stats  # takes a second to import

    factor = float(stats.t.ppf((1 + LEVEL) / 2, len(sample) - 1))
    reach = factor * statistics.stdev(sample) / math.sqrt(len(sample))
    return Interval(mean, mean - reach, mean + reach)


def interval_of_perplexity(values: Iterable[float]) -> Interval:
    """Compute the perplexity of the mean loss, with the interval of that perplexity."""
    loss = interval(map(math.log, values))
    low = math.exp(loss.low) if loss.is_bounded else -math.inf  # exp(-inf), 0, is no bound
    return Interval(_exp(loss.mean), low, _exp(loss.high))


def average_lines(
    lines: Sequence[Sequence[tuple[int, float]]], average: Callable[[Iterable[float]], Interval]
) -> list[tuple[int, Interval]]:
    """Average one line per seed, ``(update, value)`` pairs, at the updates that all lines have.

    ``average`` is one of the functions above, such as :func:`interval`.
    """
    by_seed = [dict(line) for line in lines]
    shared = sorted(set.intersection(*map(set, by_seed)))
    return [(updates, average(values[updates] for values in by_seed)) for updates in shared]


def _exp(value: float) -> float:
    """Compute an exponential; that of a huge finite loss stays finite, as it is a real bound."""
    return value if value == math.inf else math.exp(min(value, 700.0))  # exp(710) would raise
