"""Sentences about a comparison, each computed from its figures by a rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from fairseq_posenc.compare.pipeline import Outcome, Results

# A model counts as having left the plateau of a bag of words at this part of its perplexity: far
# enough below to be no chance, and more than is gained by knowing just where a block begins.
_LEFT_PLATEAU = 0.5


def statements(results: Results) -> list[str]:
    """Return what follows from the figures, as sentences in Markdown."""
    found = [_order(results), _bag_of_words(results), _race(results)]
    return [sentence for sentence in found if sentence]


def _order(results: Results) -> str:
    ranked = sorted(results.outcomes, key=lambda outcome: outcome.perplexity)
    best, worst = ranked[0], ranked[-1]
    text = f"After {results.settings.updates:,} updates, {_name(best)} has the lowest validation "
    text += f"perplexity, {best.perplexity:,.1f}"
    if best is worst:
        return f"{_name(best)} has a validation perplexity of {best.perplexity:,.1f}."
    return (
        f"{text}; the highest, {worst.perplexity:,.1f} ({_name(worst)}), is "
        f"{worst.perplexity / best.perplexity:,.2f} times that."
    )


def _bag_of_words(results: Results) -> str:
    bag = next((outcome for outcome in results.outcomes if _is_bag_of_words(outcome)), None)
    others = [outcome for outcome in results.outcomes if outcome is not bag]
    if bag is None or not bag.curve.points or not others:
        return ""
    level = min(perplexity for _, perplexity in bag.curve.points)
    left = _LEFT_PLATEAU * level
    return (
        f"{_name(bag)} cannot tell in which order the tokens stand: to it a text is a bag of "
        f"words. The lowest perplexity it reaches is {level:,.1f}. The others reach "
        f"{_LEFT_PLATEAU:.0%} of that, {left:,.1f}: {_arrivals(others, left)}."
    )


def _race(results: Results) -> str:
    """Say when the others reach the end of a baseline: learned positions, else the first model."""
    # One whose loss was never a number has no end that others could reach.
    finite = [outcome for outcome in results.outcomes if outcome.curve.points]
    able = [outcome for outcome in finite if not _is_bag_of_words(outcome)]
    if len(able) < 2:
        return ""
    baseline = next(
        (outcome for outcome in able if outcome.contender[1:] == ("learned", "")), able[0]
    )
    updates, level = baseline.curve.points[-1]
    others = [outcome for outcome in able if outcome is not baseline]
    return (
        f"{_name(baseline)} ends at perplexity {level:,.1f} after {updates:,} updates. The others "
        f"reach that: {_arrivals(others, level)}."
    )


def _arrivals(outcomes: Iterable[Outcome], level: float) -> str:
    """Return who gets to a perplexity after how many updates, the soonest first."""
    reached = [(outcome.curve.first_below(level), outcome) for outcome in outcomes]
    reached.sort(key=lambda pair: (pair[0] is None, pair[0]))
    return ", ".join(f"{_name(outcome)} {_when(updates)}" for updates, outcome in reached)


def _when(updates: Optional[int]) -> str:
    return "not in this run" if updates is None else f"after {updates:,} updates"


def _is_bag_of_words(outcome: Outcome) -> bool:
    return outcome.contender.position_encoding == "none" and not outcome.contender.directions


def _name(outcome: Outcome) -> str:
    return f"`{outcome.contender.name}`"
