"""What each encoding costs beyond plain attention, from the terms that it fills."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import torch

from fairseq_posenc import registry
from fairseq_posenc.encodings.base import Dims, Terms
from fairseq_posenc.positions import Positions, Span


class Cost(NamedTuple):
    """Formulas of a layer's cost on the reference backend: n tokens, h heads of width d, C = h d.

    Attributes:
        operations: multiplications and additions for each sentence.
        numbers: numbers held at once for each sentence.
        common_operations: those done once, for all sentences together.
        common_numbers: those held once, for all sentences together.
    """

    operations: str = ""
    numbers: str = ""
    common_operations: str = ""
    common_numbers: str = ""


# For each term, what a layer does with it; {g} is h where each head has its own, else nothing.
TERMS = {
    "query_table": Cost("2 h n (2n-1) d + h n^2", "h n (3n-1)"),
    "key_table": Cost("2 h n (2n-1) d + h n^2", "h n (3n-1)"),
    "gain": Cost("h n^2", "h n^2", "", "{g}n^2"),
    "channel_gain": Cost("3 h n^2 d", "2 h n^2", "", "{g}n^2"),
    "content_rows": Cost("4 h n (2n-1) d + 2 h n^2", "2 h n (3n-1)", "4 (2n-1) C^2", "2 (2n-1) C"),
    "value_table": Cost("h n^2 + 2 h n (2n-1) d", "h n (2n-1)"),
    "bias": Cost("h n^2", "", "", "{g}n^2"),
    "pair_bias": Cost("h n^2", "", "", "{g}n^2"),
}
# What making the terms costs, where that is more than reading a row for each distance.
MAKING = {
    "deberta": Cost("", "", "4 (2n-1) d^2", "2 (2n-1) d"),
    "fire": Cost("", "", "64 h n^2 + 96 n^2", "32 n^2"),
    "transformer_xl": Cost("", "", "2 (2n-1) C^2", "(2n-1) C"),
    "tupe": Cost("", "", "4 n d^2 + 2 n^2 d", "2 n d"),
    "tupe_shared": Cost("", "", "4 n C^2 + 2 n^2 C", "2 n C"),
}
ELSEWHERE = {
    "input": Cost("n C", "n C"),
    "rotation": Cost("6 n C", "2 n C"),
}


def operations(name: str) -> str:
    """Return how many more operations an encoding takes, in words and formulas."""
    parts = _parts(name)
    return _in_words(
        name, [part.operations for part in parts], [part.common_operations for part in parts]
    )


def numbers(name: str) -> str:
    """Return how many more numbers are held at once, in words and formulas."""
    parts = _parts(name)
    return _in_words(
        name, [part.numbers for part in parts], [part.common_numbers for part in parts]
    )


def _in_words(name: str, each: list[str], together: list[str]) -> str:
    said = []
    if any(each):
        said.append(f"``{_sum(each)}`` for each sentence")
        if registry.get(name).acts_on == "input":
            said[-1] += ", once for all layers"
    if any(together):
        said.append(f"``{_sum(together)}`` for all sentences together")
        if registry.get(name).acts_on == "scores" and _terms(name).pair_bias is not None:
            # Positions differ from row to row only where padding comes first.
            said[-1] += ", or for each if one is padded on the left"
        if registry.get(name).shared and name in MAKING:
            said[-1] += ", most of it once for all layers"
    return "; ".join(said) or "none"


def _sum(formulas: list[str]) -> str:
    """Return the sum of formulas, equal terms added up."""
    factors: Counter[str] = Counter()
    for term in " + ".join(filter(None, formulas)).split(" + "):
        factor, rest = re.fullmatch(r"(\d+ )?(.+)", term).groups()  # type: ignore[union-attr]
        factors[rest] += int(factor or 1)
    return " + ".join(
        rest if factor == 1 else f"{factor} {rest}" for rest, factor in factors.items()
    )


def _parts(name: str) -> list[Cost]:
    """Return the costs of an encoding's parts."""
    acts_on = registry.get(name).acts_on
    if acts_on != "scores":
        return [] if name == "none" else [ELSEWHERE[acts_on]]
    terms = _terms(name)
    parts = [MAKING[name]] if name in MAKING else []
    for field, cost in TERMS.items():
        term = getattr(terms, field)
        if term is not None:
            groups = term.size(1 if field == "pair_bias" else 0)
            parts.append(Cost(*(part.format(g="h " if groups > 1 else "") for part in cost)))
    return parts


def _terms(name: str) -> Terms:
    """Return what an encoding adds to the scores of a short sentence."""
    causal = name not in registry.names_for(encoder=True)
    positions = Positions.of(torch.full((1, 3), 5), padding_idx=1, eos_idx=2, tgt_len=3)
    built = registry.build(registry.parse(name), Dims(8, 2, 4, causal))
    return built.terms(Span.of(3, 3, torch.device("cpu")), positions)
