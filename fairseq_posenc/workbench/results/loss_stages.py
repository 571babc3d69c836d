"""Smooths the training loss, and divides it into stages.

DecBERT's paper defines the stages (Luo et al. 2022, arXiv:2204.08688, section 4.2): start, plateau,
dive and convergence. The paper reads their boundaries off its figure; here a rule finds them
(:func:`find_stages`).
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fairseq_posenc.workbench.running.logs import NATS_PER_BIT, Curve

SLOPE_RATIO = 4  # factor by which the loss falls faster before and after the plateau than on it
MIN_FALL = 0.1  # a dive has at least this share of the loss's total fall
_SIDE_LINES = 2  # number of neighboring lines of the log, on each side, that smooth a line
_MIN_LINES = 3  # fewest lines of the log in a segment
_MIN_NOISE = 0.001  # in nats; fairseq's logs round losses to 0.001 bits, so some show no noise


class LossStages(NamedTuple):
    """The updates at which the stages end."""

    start: int  # end of the start: the plateau begins
    plateau: int  # end of the plateau: the dive begins
    dive: int  # end of the dive: convergence begins, and lasts until the end


class Segment(NamedTuple):
    """A line segment of the fitted loss."""

    rate: float  # fall of the loss in nats per update
    updates: int  # length in updates
    end: int  # last update
    loss: float  # loss at its end in nats


def smooth_losses(curve: Curve) -> list[tuple[int, float]]:
    """Smooth the training loss, in nats, with the mean over neighboring lines of the log.

    A mean includes up to ``_SIDE_LINES`` lines on each side. Near the ends there are fewer, always
    equally many on both sides, so the first and the last value are unchanged. NaN and infinite
    losses are left out of means, and are NaN.
    """
    points = training_points(curve)
    smoothed = []
    for index, (updates, _) in enumerate(points):
        side = min(_SIDE_LINES, index, len(points) - 1 - index)
        around = points[index - side : index + side + 1]
        smoothed.append((updates, sum(nats for _, nats in around) / len(around)))
    return sorted([*smoothed, *((x.updates, math.nan) for x in curve.training if not x.is_finite)])


def last_loss(curve: Curve) -> float | None:
    """Return the last finite training loss in nats; None if no loss is finite."""
    return next((loss for _, loss in reversed(training_points(curve))), None)


def training_points(curve: Curve) -> list[tuple[int, float]]:
    """List updates and finite training losses in nats, as :func:`fit_segments` takes them."""
    return [(x.updates, x.loss * NATS_PER_BIT) for x in curve.training if x.is_finite]


def find_stages(curve: Curve) -> LossStages | None:
    """Find the stages of a training loss; None if no dive follows a plateau.

    The loss is fitted with line segments (:func:`fit_segments`). With r for ``SLOPE_RATIO``, the
    *dive* is the steepest segment that follows one at least r times flatter (the *plateau*), which
    in turn follows one at least r times steeper (the *start*). The dive includes all segments
    beside it that are at least 1 / r times as steep; the plateau includes all preceding segments
    that are flatter than this. Both the sum of the falls in the dive and the difference between its
    beginning and end must be at least ``MIN_FALL`` of the total fall, so that the recovery from a
    jump of the loss does not count as a dive.
    """
    segments = fit_segments(training_points(curve))
    total_fall = sum(segment.rate * segment.updates for segment in segments)
    falling = [segment for segment in segments if segment.rate > 0]
    for steepest in sorted(falling, key=lambda segment: segment.rate, reverse=True):
        limit = steepest.rate / SLOPE_RATIO  # segments that fall more slowly are flat
        groups = groupby(segments, key=lambda segment: segment.rate >= limit)
        parts = [list(group) for _, group in groups]  # alternately steep and flat
        index = next(number for number, part in enumerate(parts) if steepest in part)
        if index < 2:  # no plateau, or no start before it
            continue
        start = [x for part in parts[: index - 1] for x in part]  # all segments before the plateau
        plateau, dive = parts[index - 1], parts[index]
        is_start_steep = max(x.rate for x in start) >= SLOPE_RATIO * plateau[-1].rate
        fall = min(sum(x.rate * x.updates for x in dive), plateau[-1].loss - dive[-1].loss)
        if is_start_steep and fall >= MIN_FALL * total_fall:
            return LossStages(start[-1].end, plateau[-1].end, dive[-1].end)
    return None


def fit_segments(points: Sequence[tuple[int, float]]) -> Sequence[Segment]:
    """Fit losses over updates with line segments, as many as the noise warrants.

    The segments minimize the Bayesian information criterion: the sum of squared errors, in units of
    the noise, plus log(number of points) for each of a segment's three parameters (slope, height
    and end). Dynamic programming over all possible cuts takes quadratic time. The noise is
    estimated from the differences between neighbors.

    Source:
        Jackson et al. (2005), "An algorithm for optimal partitioning of data on an interval", IEEE
        Signal Processing Letters 12(2).
    """
    if len(points) < 2 * _MIN_LINES:
        return []
    updates, losses = np.array(points, dtype=float).T
    # Of Gaussian noise with deviation 1, second differences have the deviation sqrt(6), and the
    # median of the absolute values is 0.6745 deviations.
    noise = max(np.median(np.abs(np.diff(losses, 2))) / (0.6745 * math.sqrt(6)), _MIN_NOISE)
    cuts = _find_best_cuts(updates - updates.mean(), (losses - losses.mean()) / noise)
    segments = []
    for begin, end in zip(cuts, cuts[1:]):
        slope, height = map(float, np.polyfit(updates[begin:end], losses[begin:end], 1))
        previous = int(updates[begin - 1]) if begin else 0  # last update of the segment before
        last = int(updates[end - 1])
        segments.append(Segment(-slope, last - previous, last, height + slope * last))
    return segments


def _find_best_cuts(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Find the indices that best cut points with noise 1 into segments, including both ends."""
    count = len(x)
    # The next three have an entry n for the first n points, for every n from 0.
    sums = np.pad(np.cumsum([x, y, x * x, x * y, y * y], axis=1), ((0, 0), (1, 0)))
    lowest = np.array([0] + [np.inf] * count)  # cost of the best cuts; infinite: too few points
    begin_of = [0] * (count + 1)  # index of the first point in the last segment of these cuts
    for end in range(_MIN_LINES, count + 1):
        begins = np.arange(end - _MIN_LINES + 1)
        n = end - begins
        sum_x, sum_y, sum_xx, sum_xy, sum_yy = sums[:, end, None] - sums[:, begins]
        explained = (sum_xy - sum_x * sum_y / n) ** 2 / (sum_xx - sum_x * sum_x / n)  # by slopes
        errors = sum_yy - sum_y * sum_y / n - explained  # squared, of least-squares lines
        costs = lowest[begins] + np.maximum(errors, 0)
        begin_of[end] = int(costs.argmin())
        lowest[end] = costs[begin_of[end]] + 3 * math.log(count)
    cuts = [count]
    while cuts[-1] > 0:
        cuts.append(begin_of[cuts[-1]])
    return cuts[::-1]
