"""The training loss, smoothed, and the stages that it goes through.

The stages are those of DecBERT's paper (Luo et al. 2022, arXiv:2204.08688, section 4.2): start,
plateau, dive and convergence. The paper reads their bounds off its figure; here they follow from a
rule (:func:`find_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from fairseq_posenc.workbench.running.logs import Curve

SIDE = 2  # lines of the log on either side over which a line is smoothed for the picture
SLOW = 4  # the loss falls this many times faster before and after the plateau than on it
LEAST = 0.1  # a dive is at least this share of the loss's whole fall
SHORTEST = 3  # lines of the log, for a straight piece
_DIGITS = 0.001  # nats, to which fairseq writes a loss: no line is more exact


class LossStages(NamedTuple):
    """Where the stages end, in updates."""

    start: int  # the plateau begins
    plateau: int  # the dive begins
    dive: int  # convergence begins, which lasts until the end


class Segment(NamedTuple):
    """A straight piece of a fitted loss."""

    rate: float  # how fast it falls, in nats an update
    updates: int  # how many it lasts
    end: int  # the last of them
    loss: float  # there, in nats


def smooth_losses(curve: Curve) -> list[tuple[int, float]]:
    """Smooth the training loss, in nats: at each line, the mean with those around it.

    There are ``SIDE`` on either side; near both ends fewer, as many on one side as on the other, so
    that the first and the last stay what they are. A line is itself fairseq's mean since the line
    before. Losses that are NaN or infinite are left out.
    """
    kept = [entry for entry in curve.training if entry.is_finite]
    points = []
    for index, entry in enumerate(kept):
        side = min(SIDE, index, len(kept) - 1 - index)
        around = kept[index - side : index + side + 1]
        points.append((entry.updates, sum(point.nats for point in around) / len(around)))
    return points


def training_points(curve: Curve) -> list[tuple[int, float]]:
    """List updates and training loss in nats, without losses that are NaN or infinite."""
    return [(entry.updates, entry.nats) for entry in curve.training if entry.is_finite]


def find_stages(curve: Curve) -> Optional[LossStages]:
    """Find the stages of a training's loss; None if no dive follows a plateau.

    The loss is fitted with straight pieces (:func:`fit_segments`). The *dive* is the steepest
    piece that follows one at least ``SLOW`` times flatter (the *plateau*), which in turn follows
    one ``SLOW`` times steeper (the *start*). Dive and plateau are as long as pieces follow each
    other that are at least, or at most, a ``SLOW``-th as steep as the steepest one.
    A dive is ``LEAST`` of the loss's whole fall, along its pieces and from its beginning to its
    end: the way back from a jump, as over a hard stretch of text, is none.
    """
    segments = fit_segments(training_points(curve))
    whole = sum(segment.rate * segment.updates for segment in segments)
    for peak in sorted(range(len(segments)), key=lambda i: segments[i].rate, reverse=True):
        limit = segments[peak].rate / SLOW
        slow = [index for index in range(peak) if segments[index].rate <= limit]
        if limit <= 0 or not slow:
            continue
        slower = (i for i in range(peak, len(segments)) if segments[i].rate < limit)
        end = next(slower, len(segments))
        last = slow[-1]
        first = next(i for i in range(last, -1, -1) if i == 0 or segments[i - 1].rate > limit)
        fastest = max((segment.rate for segment in segments[:first]), default=-math.inf)
        along = sum(segment.rate * segment.updates for segment in segments[last + 1 : end])
        fall = min(along, segments[last].loss - segments[end - 1].loss)
        if fastest >= SLOW * segments[last].rate and fall >= LEAST * whole:
            return LossStages(segments[first - 1].end, segments[last].end, segments[end - 1].end)
    return None


def fit_segments(points: Sequence[tuple[int, float]]) -> list[Segment]:
    """Fit updates and losses with the best straight pieces, as many as noise warrants.

    What is least is the sum of squared errors, in units of the noise, and log(lines) for each of
    the three numbers of a piece (slope, height and end), the Bayesian information criterion;
    found for all ways to cut, in time quadratic in lines. The noise is that of neighbours.

    ruptures' Pelt finds the same cuts (cost ``linear``), but takes 70 times as long at 400 lines,
    and minutes at 4,000.

    Source:
        Jackson et al. (2005), "An algorithm for optimal partitioning of data on an interval", IEEE
        Signal Processing Letters 12(2).
    """
    if len(points) < 2 * SHORTEST:
        return []
    updates, losses = np.array(points, dtype=float).T
    noise = max(np.median(np.abs(np.diff(losses, 2))) / (0.6745 * math.sqrt(6)), _DIGITS)
    cuts = _find_best_cuts(updates - updates.mean(), (losses - losses.mean()) / noise)
    segments = []
    for begin, end in zip(cuts, cuts[1:]):
        slope, height = map(float, np.polyfit(updates[begin:end], losses[begin:end], 1))
        before, last = points[begin - 1][0] if begin else 0, points[end - 1][0]
        segments.append(Segment(-slope, last - before, last, height + slope * last))
    return segments


def _find_best_cuts(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Find where to cut lines of noise 1 into straight pieces, with both ends."""
    lines = len(x)
    sums = np.pad(np.cumsum([x, y, x * x, x * y, y * y], axis=1), ((0, 0), (1, 0)))
    least, begin_of = np.full(lines + 1, np.inf), [0] * (lines + 1)  # by the end of a piece
    least[0] = 0
    for end in range(SHORTEST, lines + 1):
        begins = np.arange(end - SHORTEST + 1)
        costs = least[begins] + _compute_errors(sums[:, end, None] - sums[:, begins], end - begins)
        begin_of[end] = int(costs.argmin())
        least[end] = costs[begin_of[end]] + 3 * math.log(lines)
    cuts = [lines]
    while cuts[-1] > 0:
        cuts.append(begin_of[cuts[-1]])
    return cuts[::-1]


def _compute_errors(sums: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Compute the squared errors of the best lines, from sums of x, y, xx, xy and yy."""
    x, y, xx, xy, yy = sums
    left = yy - y * y / lines - (xy - x * y / lines) ** 2 / (xx - x * x / lines)
    return np.maximum(left, 0)
