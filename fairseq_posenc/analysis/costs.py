"""Describes the cost of each encoding beyond plain attention, from its terms.

The letters of the formulas are those of :class:`~fairseq_posenc.encodings.term.Cost`.
"""

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
    return _describe(name, "operations")


def describe_numbers(name: str) -> str:
    """Describe the additional numbers in memory at once, in words and formulas."""
    return _describe(name, "numbers")


def _describe(name: str, quantity: str) -> str:
    """Describe a quantity of :class:`Cost`: ``operations`` or ``numbers``."""
    encoding = registry.get(name)
    terms = compute_terms(name)
    costs = [encoding.cost]
    for _, term, tensor in terms.present():
        # The formulas of terms have `{g}` for h if each head has a table, else for nothing.
        heads = "h " if term.per_head(tensor) else ""
        costs.append(Cost(*(formula.format(g=heads) for formula in term.cost)))
    per_sentence = [getattr(cost, quantity) for cost in costs]
    per_batch = [getattr(cost, f"common_{quantity}") for cost in costs]
    phrases = []
    if any(per_sentence):
        phrases.append(f"``{_add_formulas(per_sentence)}`` for each sentence")
        if encoding.acts_on == "input":
            phrases[-1] += ", once for all layers"
    if any(per_batch):
        phrases.append(f"``{_add_formulas(per_batch)}`` for all sentences together")
        if terms.pair_bias is not None:
            # It depends on positions, which differ from row to row only with padding on the left.
            phrases[-1] += ", or for each if one is padded on the left"
        if encoding.shared_by_layers and any(encoding.cost):
            phrases[-1] += ", most of it once for all layers"
    if any(re.search(r"\bu\b", formula) for formula in (*per_sentence, *per_batch)):
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


def compute_terms(name: str) -> Terms:
    """Compute the terms of an encoding in a tiny stack, to see which there are."""
    dims = Dims(
        embed_dim=8, num_heads=2, max_positions=4, causal=bool(registry.get(name).causal_only)
    )
    (terms,) = Assembly(specs.parse(name), dims).check("auto")
    return terms
