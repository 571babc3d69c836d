"""The training loss, smoothed, and the stages that it goes through.

The stages are those of DecBERT's paper (Luo et al. 2022, arXiv:2204.08688, section 4.2): start,
plateau, dive and convergence. The paper reads their bounds off its figure; here they follow from a
rule (:func:`find_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Optional

import numpy as np

from fairseq_posenc.running.logs import Curve

Points = Sequence[tuple[int, float]]  # updates, and the loss in nats

SIDE = 2  # lines of the log on either side over which a line is smoothed
SLOW = 4  # times as fast as on the plateau falls the loss before and after it
LEAST = 0.05  # of the loss's whole fall, for a fall to be a dive


class Stages(NamedTuple):
    """Where the stages end, in updates.

    Attributes:
        start: the plateau begins.
        plateau: the dive begins.
        dive: convergence begins, which lasts until the end.
    """

    start: int
    plateau: int
    dive: int


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """Return updates and training loss in nats: at each line, the mean with those around it.

    There are ``SIDE`` on either side; near both ends fewer, as many on one side as on the other, so
    that the first and the last stay what they are. A line is itself fairseq's mean since the line
    before. Losses that are no number are left out.
    """
    kept = [entry for entry in curve.training if entry.is_finite]
    points = []
    for index, entry in enumerate(kept):
        side = min(SIDE, index, len(kept) - 1 - index)
        around = kept[index - side : index + side + 1]
        points.append((entry.updates, sum(each.nats for each in around) / len(around)))
    return points


def find_stages(curve: Curve) -> Optional[Stages]:
    """Return the stages of a training's loss, None if it has no plateau with a dive after it.

    They are sought in the smoothed loss (:func:`_seek`), and there a bound is as blurred as the
    smoothing. So each is then set to the corner of the two straight lines, meeting there, that
    fit the log's own lines best: as many on either side as half of the shorter of the two stages.
    """
    points = [(entry.updates, entry.nats) for entry in curve.training if entry.is_finite]
    found = _seek(smoothed(curve))
    if found is None:
        return None
    corners = []
    for before, bound, after in zip((0, *found), found, (*found[1:], len(points) - 1)):
        reach = max(min(bound - before, after - bound) // 2, SIDE)
        first = max(bound - reach, 0)
        corners.append(points[first + _corner(points[first : bound + reach + 1])][0])
    return Stages(*corners)


def _seek(points: Points) -> Optional[tuple[int, int, int]]:
    """Return the lines at which start, plateau and dive of a smoothed loss end.

    The dive is around the point where the loss falls fastest of all those before which it once
    fell ``SLOW`` times slower, and before that ``SLOW`` times faster than then. It lasts while the
    loss falls at least a ``SLOW``-th as fast as at that point. The plateau begins where the loss
    first falls slower than that after its fastest fall before the dive. Noise is no dive: it must
    be ``LEAST`` of the loss's whole fall, and on average ``SLOW`` times as fast as the plateau,
    which must be longer than what a line is smoothed over.
    """
    rates = _rates(points)
    slowest = _slowest_before(rates)
    whole = points[0][1] - min(loss for _, loss in points) if points else 0.0
    for peak in sorted(range(len(rates)), key=rates.__getitem__, reverse=True):
        limit = rates[peak] / SLOW
        if limit <= 0:
            break
        if slowest[peak] > limit:
            continue
        begin = max(index for index in range(peak) if rates[index] <= limit)
        end = next((i for i in range(peak, len(rates)) if rates[i] < limit), len(rates) - 1)
        fastest = max(range(begin + 1), key=rates.__getitem__)
        start = next(i for i in range(fastest, begin + 1) if rates[i] <= limit or i == begin)
        if begin - start <= 2 * SIDE:
            continue
        fall = points[begin][1] - points[end][1]
        plateau, dive = (_mean_rate(points, *ends) for ends in ((start, begin), (begin, end)))
        if fall >= LEAST * whole and dive >= SLOW * plateau:
            return start, begin, end
    return None


def _corner(points: Points) -> int:
    """Return the point at which two straight lines meet that fit all of them best."""
    updates, losses = np.array(points, dtype=float).T

    def error(corner: float) -> float:
        lines = np.stack([np.ones_like(updates), updates, np.maximum(updates - corner, 0)], axis=1)
        fitted = lines @ np.linalg.lstsq(lines, losses, rcond=None)[0]
        return float(((losses - fitted) ** 2).sum())

    return min(range(1, len(points) - 1), key=lambda index: error(updates[index]))


def _mean_rate(points: Points, first: int, last: int) -> float:
    updates = points[last][0] - points[first][0]
    return (points[first][1] - points[last][1]) / updates if updates else 0.0


def _rates(points: Points) -> list[float]:
    """Return how fast the loss falls at each point, in nats an update, from its two neighbours."""
    last = len(points) - 1
    pairs = [(points[max(i - 1, 0)], points[min(i + 1, last)]) for i in range(len(points))]
    return [(a[1] - b[1]) / (b[0] - a[0]) if b[0] > a[0] else 0.0 for a, b in pairs]


def _slowest_before(rates: Sequence[float]) -> list[float]:
    """Return for each point the slowest fall before it, after one ``SLOW`` times faster."""
    fastest = list(accumulate(rates, max, initial=-math.inf))
    slow = [rate if rate * SLOW <= before else math.inf for rate, before in zip(rates, fastest)]
    return list(accumulate(slow, min, initial=math.inf))[:-1]
