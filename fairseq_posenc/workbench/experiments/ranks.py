"""From which perplexity on the ranks of models mean something, and how far they are from it.

A model that knows only how often each piece occurs has the unigram perplexity. One that has not
come down to half of that has learned nothing of the order of the text, which is what position
encodings are for: so a rank above it says nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

from fairseq_posenc.workbench.results.markdown import code

_SHARE = 0.5  # of the unigram perplexity
_RECENT = 0.7  # share of a curve after which its points say how fast it falls
_STEP = 50  # updates to which a number of them is rounded up


def meaningful_perplexity(unigram: float) -> float:
    """Compute the perplexity from which on ranks mean something."""
    return _SHARE * unigram


def describe_ranks(name: str, lowest: float, updates: int, unigram: float) -> str:
    """Say whether the ranks of models mean something.

    Args:
        name: the model with the lowest perplexity.
        lowest: that perplexity; may be NaN.
        updates: the updates after which it was measured.
        unigram: the perplexity of a model that knows only how often each piece occurs.
    """
    level = meaningful_perplexity(unigram)
    if lowest <= level:
        return (
            f"Ranks mean something here: {code(name)} has {lowest:,.1f}, and ranks mean something "
            f"from {level:,.1f} on, half the perplexity of a model that only counts pieces."
        )
    return (
        f"**Ranks mean nothing yet**: after {updates:,} updates the lowest perplexity is "
        f"{lowest:,.1f} ({code(name)}), and ranks mean something from {level:,.1f} on, half the "
        "perplexity of a model that only counts pieces."
    )


def estimate_updates(curve: Sequence[tuple[int, float]], unigram: float) -> Optional[int]:
    """Estimate how many updates a model needs in all until ranks mean something.

    Its loss goes on falling as it did in the last part of its curve; None if it did not fall.

    Args:
        curve: updates and perplexity, from the first validation on.
        unigram: the perplexity of a model that knows only how often each piece occurs.
    """
    known = [(updates, math.log(value)) for updates, value in curve if math.isfinite(value)]
    if len(known) < 2:
        return None
    last, loss = known[-1]
    before, higher = ([point for point in known if point[0] <= _RECENT * last] or known)[-1]
    if before == last:
        before, higher = known[-2]
    slope = (higher - loss) / (last - before)
    if slope <= 0:
        return None
    missing = max(0.0, loss - math.log(meaningful_perplexity(unigram)))
    return math.ceil((last + missing / slope) / _STEP) * _STEP
