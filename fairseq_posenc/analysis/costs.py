"""Describes the cost of each encoding beyond plain attention, from its terms, for the docs."""

import re
from collections import Counter
from collections.abc import Sequence

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import Assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms


def describe_operations(name: str) -> str:
    """Describe the additional operations of an encoding, in words and formulas."""
    costs = _list_costs(name)
    by_sentence = [cost.operations for cost in costs]
    return _format_costs(name, by_sentence, [cost.common_operations for cost in costs])


def describe_numbers(name: str) -> str:
    """Describe the additional numbers in memory at once, in words and formulas."""
    costs = _list_costs(name)
    by_sentence = [cost.numbers for cost in costs]
    return _format_costs(name, by_sentence, [cost.common_numbers for cost in costs])


def _format_costs(name: str, by_sentence: Sequence[str], together: Sequence[str]) -> str:
    """Join formulas that count for each sentence, and those that count once in a batch."""
    phrases = []
    if any(by_sentence):
        phrases.append(f"``{_add_formulas(by_sentence)}`` for each sentence")
        if registry.get(name).acts_on == "input":
            phrases[-1] += ", once for all layers"
    if any(together):
        phrases.append(f"``{_add_formulas(together)}`` for all sentences together")
        if compute_terms(name).pair_bias is not None:
            # Positions differ from row to row only with padding on the left.
            phrases[-1] += ", or for each if one is padded on the left"
        if registry.get(name).shared and any(registry.get(name).cost):
            phrases[-1] += ", most of it once for all layers"
    if any(re.search(r"\bu\b", formula) for formula in (*by_sentence, *together)):
        phrases.append("u is the number of distinct rows of a table, at most 2n-1")
    return "; ".join(phrases) or "none"


def _add_formulas(formulas: Sequence[str]) -> str:
    """Add up formulas: ``n d`` and ``2 n d + n`` to ``3 n d + n``."""
    factors: Counter[str] = Counter()
    for term in " + ".join(filter(None, formulas)).split(" + "):
        factor, rest = re.fullmatch(r"(\d+ )?(.+)", term).groups()  # type: ignore[union-attr]
        factors[rest] += int(factor or 1)
    return " + ".join(
        rest if factor == 1 else f"{factor} {rest}" for rest, factor in factors.items()
    )


def _list_costs(name: str) -> list[Cost]:
    """List the costs of an encoding's parts: its own, and those of its terms."""
    parts = [registry.get(name).cost]
    for _, term, tensor in compute_terms(name).present():
        groups = "h " if term.per_head(tensor) else ""
        parts.append(Cost(*(part.format(g=groups) for part in term.cost)))
    return parts


def compute_terms(name: str) -> Terms:
    """Compute the terms of a single token."""
    dims = Dims(8, 2, 4, causal=bool(registry.get(name).causal_only))
    return Assembly(specs.parse(name), dims).check("auto")[0]
