"""Describes what each encoding costs beyond plain attention: its terms, and all else it computes.

:class:`~fairseq_posenc.encodings.term.Cost` explains the formulas and the letters in them.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import Assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms


def describe_cost(name: str, quantity: Literal["operations", "numbers"]) -> str:
    """Describe additional operations, or numbers in memory at once, in words and formulas."""
    encoding = registry.get(name)
    terms = draft_terms(name)
    costs = [encoding.cost]
    for _, term, tensor in terms.present():
        # In the formulas `{g}` stands for h if each head has a table, else for nothing.
        factor = "h " if term.per_head(tensor) else ""
        costs.append(Cost(*(formula.format(g=factor) for formula in term.cost)))
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
            # Sentences have the same positions unless one is padded on the left.
            phrases[-1] += ", or for each if one is padded on the left"
        if encoding.shared_by_layers and any(encoding.cost):  # layers only add what it computed
            phrases[-1] += ", most of it once for all layers"
    if any(re.search(r"\bu\b", formula) for formula in (*per_sentence, *per_batch)):
        phrases.append("u is the number of distinct rows of a table, at most 2n-1")
    return "; ".join(phrases) or "none"


def _add_formulas(formulas: Sequence[str]) -> str:
    """Add up formulas: ``n d`` and ``2 n d + n`` to ``3 n d + n``."""
    factors: Counter[str] = Counter()
    for product in " + ".join(filter(None, formulas)).split(" + "):
        factor, _, rest = product.partition(" ")
        if factor.isdecimal():
            factors[rest] += int(factor)
        else:
            factors[product] += 1
    return " + ".join(
        rest if factor == 1 else f"{factor} {rest}" for rest, factor in factors.items()
    )


def draft_terms(name: str) -> Terms:
    """Compute the terms of an encoding in a tiny stack; they have shapes, but no values."""
    spec = specs.parse(name)
    dims = Dims(embed_dim=8, num_heads=2, max_positions=4, causal=spec.is_causal_only)
    (terms,) = Assembly(spec, dims).draft_terms(backend="auto")  # all layers are of one kind
    return terms
