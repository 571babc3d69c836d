"""Derives sentences about a comparison from its figures, by fixed rules.

A curve has validation perplexity by updates; models arrive at a level when their curve reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

_LEAST_FALL = 0.02  # a perplexity that falls by this share in the last quarter is still falling
# A model at this share of the perplexity of a bag of words uses the order of the text: chance, or
# knowing only where a block begins, would not take it so far.
_PLATEAU_SHARE = 0.5


def derive_statements(
    models: Sequence[SeedAggregate], unigram: float, *, masked: bool = True
) -> list[str]:
    """Derive conclusions from the figures of masked or causal LMs, in Markdown.

    ``models`` are in the user's order: without learned positions, the first one is the baseline.
    ``unigram`` is the perplexity of a model that knows only the frequencies of pieces.
    """
    trained = [model for model in models if not model.divergences]
    diverged = [f"{_quote(model)} {model.show(2)}." for model in models if model.divergences]
    sentences = [_describe_ranks(trained, unigram), *diverged, _describe_falling(trained)]
    if few := explain_few_seeds(min(len(model.outcomes) for model in models)):
        sentences.append(few)
    else:
        # Masked LMs without positions see no order of tokens; causal LMs see it by their mask.
        bags = [model for model in trained if masked and model.variant.is_plain("none")]
        others = [model for model in trained if model not in bags]
        sentences += describe_differences(
            {model.variant.name: model.perplexity_by_seed for model in trained}
        )
        sentences += [_compare_with_bag(bag, others) for bag in bags]
        sentences.append(_describe_arrivals(others))
    return [sentence for sentence in sentences if sentence]


def _describe_ranks(models: Sequence[SeedAggregate], unigram: float) -> str:
    """Say whether ranks mean something and, if not, after how many updates they will."""
    best = min(models, key=lambda model: model.sort_key, default=None)
    if best is None or not best.curve:
        return ""
    curve = [(updates, level.mean) for updates, level in best.curve]
    lowest = best.perplexity.mean
    sentence = describe_ranks(best.variant.name, lowest, curve[-1][0], unigram)
    if lowest <= meaningful_perplexity(unigram):
        return sentence
    needed = estimate_updates(curve, unigram)
    advice = (
        f"At the pace of the last validations that takes about {needed:,} updates: add `--updates "
        f"{needed}`, which continues these trainings."
        if needed
        else "It did not fall in the last validations: try other learning rates (`--lrs`) or more "
        "text."
    )
    return f"{sentence} {advice}"


def _describe_falling(models: Sequence[SeedAggregate]) -> str:
    """List the models whose perplexity still falls, so that a longer training may change ranks."""
    falls = []
    for model in models:
        curve = model.curve
        earlier = [level.mean for updates, level in curve if updates <= 0.75 * curve[-1][0]]
        if earlier and (fall := 1 - curve[-1][1].mean / earlier[-1]) > _LEAST_FALL:
            falls.append(f"{_quote(model)} by {fall:.0%}")
    sentence = "Validation perplexity still fell in the last quarter of the training:"
    return f"{sentence} {', '.join(falls)}." if falls else ""


def _compare_with_bag(bag: SeedAggregate, others: Sequence[SeedAggregate]) -> str:
    """Say when models leave the plateau of a masked LM without positions."""
    if not bag.curve:
        return ""
    others = [model for model in others if _is_below(model, bag)]
    lowest = min(interval.mean for _, interval in bag.curve)
    level = _PLATEAU_SHARE * lowest
    finding = (
        f"{_quote(bag)} cannot see the order of tokens: to it, a text is a bag of words. Its "
        f"lowest perplexity is {lowest:,.1f}."
    )
    if not others:
        return f"{finding} No other model is significantly below it."
    arrivals = _format_arrivals(others, level)
    return f"{finding} Others reach {_PLATEAU_SHARE:.0%} of that ({level:,.1f}): {arrivals}."


def _describe_arrivals(models: Sequence[SeedAggregate]) -> str:
    """Describe when models reach the final perplexity of the baseline."""
    # A model whose loss was always NaN has no final perplexity.
    models = [model for model in models if model.curve]
    if not models:
        return ""
    baseline = next((model for model in models if model.variant.is_plain("learned")), models[0])
    others = [model for model in models if _is_below(model, baseline)]
    updates, level = baseline.curve[-1]
    if not others:
        return ""
    return (
        f"{_quote(baseline)} ends at perplexity {level.mean:,.1f} after {updates:,} updates. "
        f"Others reach that: {_format_arrivals(others, level.mean)}."
    )


def _format_arrivals(models: Iterable[SeedAggregate], level: float) -> str:
    """Format after how many updates models reach a perplexity, from the first to the last seed."""
    return ", ".join(f"{_quote(model)} {_format_arrival(model, level)}" for model in models)


def _format_arrival(model: SeedAggregate, level: float) -> str:
    by_seed = [outcome.curve.first_below(level) for outcome in model.outcomes]
    arrivals = [updates for updates in by_seed if updates is not None]
    if not arrivals:
        return "not in this run"
    first, last = min(arrivals), max(arrivals)
    span = f"after {first:,} to {last:,} updates" if first < last else f"after {first:,} updates"
    is_partial = len(arrivals) < len(by_seed)
    return f"{span} ({len(arrivals)} of {len(by_seed)} seeds)" if is_partial else span


def _is_below(model: SeedAggregate, other: SeedAggregate) -> bool:
    """Check whether a model's perplexity is significantly lower than another's."""
    difference = compare(model.perplexity_by_seed, other.perplexity_by_seed)
    return difference.is_significant and difference.interval.mean < 0


def _quote(model: SeedAggregate) -> str:
    return code(model.variant.name)
