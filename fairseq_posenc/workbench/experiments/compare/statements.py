"""Sentences about a comparison, each computed from its figures by a rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

from fairseq_posenc.workbench.experiments.outcomes import SeedAggregate
from fairseq_posenc.workbench.experiments.ranks import (
    describe_ranks,
    estimate_updates,
    meaningful_perplexity,
)
from fairseq_posenc.workbench.results.differences import (
    compare,
    describe_differences,
    explain_few_seeds,
)
from fairseq_posenc.workbench.results.markdown import code

_FALLING = 0.02  # share by which the perplexity still falls in the last quarter
# A model counts as having left the plateau of a bag of words at this part of its perplexity: far
# enough below to be no chance, and more than is gained by knowing just where a block begins.
_LEFT_PLATEAU = 0.5


def derive_statements(
    models: Sequence[SeedAggregate], unigram: float, masked: bool = True
) -> list[str]:
    """Say what follows from the figures of masked or of causal LMs, in Markdown.

    ``unigram`` is the perplexity of a model that knows only how often each piece occurs.
    """
    able = [model for model in models if not model.diverged]
    diverged = [f"{_quote(model)} {model.show(2)}." for model in models if model.diverged]
    shown = [*_describe_ranks(able, unigram), *diverged, *_describe_falling(able)]
    if few := explain_few_seeds(min(len(model.outcomes) for model in models)):
        return [*shown, few]
    bag = next((model for model in able if masked and model.variant.model == ("none", "")), None)
    others = [model for model in able if model is not bag]
    order = describe_differences({model.variant.name: model.by_seed for model in able})
    sentences = [*shown, *order, _compare_with_bag(bag, others), _describe_arrivals(others)]
    return [sentence for sentence in sentences if sentence]


def _describe_ranks(models: Sequence[SeedAggregate], unigram: float) -> list[str]:
    """Say whether ranks mean something, and if not, how many updates that takes."""
    if not models:
        return []
    best = min(models, key=lambda model: model.sort_key)
    curve = [(updates, level.mean) for updates, level in best.curve]
    if not curve:
        return []
    lowest, (updates, _) = best.perplexity.mean, curve[-1]
    sentence = describe_ranks(best.variant.name, lowest, updates, unigram)
    if lowest <= meaningful_perplexity(unigram):
        return [sentence]
    needed = estimate_updates(curve, unigram)
    advice = (
        f"At the pace of its last validations it gets there after about {needed:,} updates: add "
        f"`--updates {needed}`, which continues these trainings."
        if needed
        else "It did not fall in its last validations: try other learning rates (`--lrs`), or "
        "more text."
    )
    return [f"{sentence} {advice}"]


def _describe_falling(models: Sequence[SeedAggregate]) -> list[str]:
    """Say whose perplexity still falls at the end, so that a longer training changes the order."""
    falls = []
    for model in models:
        curve = [(updates, level.mean) for updates, level in model.curve]
        before = [value for updates, value in curve if updates <= 0.75 * curve[-1][0]]
        if before and 1 - curve[-1][1] / before[-1] > _FALLING:
            falls.append(f"{_quote(model)} by {1 - curve[-1][1] / before[-1]:.0%}")
    if not falls:
        return []
    when = "in the last quarter of the training"
    return [f"Validation perplexity fell further {when}: {', '.join(falls)}."]


def _compare_with_bag(bag: Optional[SeedAggregate], others: Sequence[SeedAggregate]) -> str:
    if bag is None or not bag.curve:
        return ""
    others = [model for model in others if _is_below(model, bag)]
    level = min(interval.mean for _, interval in bag.curve)
    left = _LEFT_PLATEAU * level
    text = (
        f"{_quote(bag)} cannot see the order of tokens: to it, a text is a bag of words. Its "
        f"lowest perplexity is {level:,.1f}."
    )
    if not others:
        return f"{text} No other model is significantly below it."
    arrivals = _format_arrivals(others, left)
    return f"{text} Time to {_LEFT_PLATEAU:.0%} of that ({left:,.1f}): {arrivals}."


def _describe_arrivals(models: Sequence[SeedAggregate]) -> str:
    """Say when the others reach the end of a baseline: learned positions, else the first model."""
    # One whose loss was never a number has no end that others could reach.
    able = [model for model in models if model.curve]
    if not able:
        return ""
    baseline = next((model for model in able if model.variant.model == ("learned", "")), able[0])
    others = [model for model in able if _is_below(model, baseline)]
    updates, level = baseline.curve[-1]
    if not others:
        return ""
    return (
        f"{_quote(baseline)} ends at perplexity {level.mean:,.1f} after {updates:,} updates. "
        f"Others reach that: {_format_arrivals(others, level.mean)}."
    )


def _format_arrivals(models: Iterable[SeedAggregate], level: float) -> str:
    """Format who reaches a perplexity after how many updates, over the seeds."""
    return ", ".join(f"{_quote(model)} {_format_arrival(model, level)}" for model in models)


def _format_arrival(model: SeedAggregate, level: float) -> str:
    arrivals = [outcome.curve.first_below(level) for outcome in model.outcomes]
    known = sorted(updates for updates in arrivals if updates is not None)
    if not known:
        return "not in this run"
    first, last = known[0], known[-1]
    when = f"after {first:,} to {last:,} updates" if first < last else f"after {first:,} updates"
    some = len(known) < len(arrivals)
    return when + (f" ({len(known)} of {len(arrivals)} seeds)" if some else "")


def _is_below(model: SeedAggregate, other: SeedAggregate) -> bool:
    """Whether a model's perplexity is significantly lower than another's."""
    difference = compare(model.by_seed, other.by_seed)
    return difference.is_significant and difference.interval.mean < 0


def _quote(model: SeedAggregate) -> str:
    return code(model.variant.name)
