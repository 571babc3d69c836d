"""Decides whether perplexities are low enough for the ranks of models to mean something.

A model that knows only the frequencies of pieces has the unigram perplexity. A model above half of
it has hardly learned anything from the order of the text, so its rank says nothing about its
position encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

from fairseq_posenc.workbench.results.markdown import code

_RECENT = 0.7  # the fall of the loss is measured from this share of the updates to the last one
_ROUNDING = 50  # estimates are rounded up to a multiple of this number of updates


def meaningful_perplexity(unigram: float) -> float:
    """Compute the highest perplexity of the best model at which ranks mean something."""
    return unigram / 2


def describe_ranks(name: str, lowest: float, updates: int, unigram: float) -> str:
    """Say whether the ranks of models mean something after ``updates``.

    The model ``name`` has the ``lowest`` perplexity; NaN, if all models diverged, means nothing.
    """
    level = f"{meaningful_perplexity(unigram):,.1f}"
    rule = f"below {level}, half the perplexity of a model that only counts pieces"
    if lowest <= meaningful_perplexity(unigram):
        return f"Ranks mean something here: {code(name)} has {lowest:,.1f}, {rule}."
    return (
        f"**Ranks mean nothing yet**: after {updates:,} updates the lowest perplexity is "
        f"{lowest:,.1f} ({code(name)}). They mean something {rule}."
    )


def estimate_updates(curve: Sequence[tuple[int, float]], unigram: float) -> Optional[int]:
    """Estimate the total number of updates after which ranks mean something.

    The loss is assumed to fall as fast as in the last part of ``curve``, the perplexity by updates.
    The estimate is None if it did not fall, or if fewer than two points are finite.
    """
    points = [(updates, math.log(value)) for updates, value in curve if math.isfinite(value)]
    if len(points) < 2:
        return None
    last, loss = points[-1]
    early = [point for point in points if point[0] <= _RECENT * last]
    first, first_loss = early[-1] if early else points[-2]
    fall = (first_loss - loss) / (last - first)  # nats per update
    if fall <= 0:
        return None
    distance = max(0.0, loss - math.log(meaningful_perplexity(unigram)))
    return math.ceil((last + distance / fall) / _ROUNDING) * _ROUNDING
