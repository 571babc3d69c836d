"""Means over seeds, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

LEVEL = 0.95
LEAST_SEEDS = 3  # fewest seeds for an interval: with two, Student's t has a factor of 12.7
NOTE = f"Student's t, {LEVEL:.0%}, over the seeds"


class Interval(NamedTuple):
    """A mean over seeds and where the true one lies, by Student's t, with a chance of ``LEVEL``.

    Fewer than ``LEAST_SEEDS`` values say too little of chance: their interval has no bounds.
    """

    mean: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, float]:
        """Collect mean and bounds by names for a record."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}

    def show(self, digits: int) -> str:
        """Format the mean and, if there are any, the bounds."""
        mean = f"{self.mean:,.{digits}f}"
        if not math.isfinite(self.high - self.low):
            return mean
        return f"{mean} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def interval(values: Iterable[float]) -> Interval:
    """Compute the mean of some values with its interval; unbounded if any is NaN."""
    known = list(values)
    mean = statistics.fmean(known)
    if len(known) < LEAST_SEEDS or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)

    from scipy import stats  # a second to import

    reach = stats.t.ppf((1 + LEVEL) / 2, len(known) - 1) * statistics.stdev(known)
    reach = float(reach) / math.sqrt(len(known))
    return Interval(mean, mean - reach, mean + reach)


def interval_of_share(values: Iterable[float]) -> Interval:
    """Compute the mean of shares of a whole with its interval, which ends at 0 and 1."""
    mean, low, high = interval(values)
    return Interval(mean, max(low, 0.0), min(high, 1.0)) if math.isfinite(low) else interval([mean])


def interval_of_perplexity(values: Iterable[float]) -> Interval:
    """Compute the perplexity of the mean loss, with the interval of that."""
    known = [math.log(value) for value in values]
    mean, low, high = interval(known)
    if math.isinf(high):
        return Interval(_exp(mean), -math.inf, math.inf)
    return Interval(_exp(mean), math.exp(low), _exp(high))


def average_lines(
    lines: Sequence[Sequence[tuple[int, float]]], over: Callable[[Iterable[float]], Interval]
) -> list[tuple[int, Interval]]:
    """Compute the mean over seeds at the updates at which all lines, one a seed, have a value.

    ``over`` is the rule, such as :func:`interval_of_perplexity`.
    """
    known = [dict(line) for line in lines]
    shared = sorted(set.intersection(*map(set, known)))
    return [(at, over(values[at] for values in known)) for at in shared]


def _exp(value: float) -> float:
    return value if value == math.inf else math.exp(min(value, 700.0))
