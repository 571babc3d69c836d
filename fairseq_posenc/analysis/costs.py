"""What each encoding costs beyond plain attention, from the terms that it fills."""

from __future__ import annotations

import re
from collections import Counter

from fairseq_posenc import registry
from fairseq_posenc.assembly import Assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Cost, Terms


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
        if terms_of(name).pair_bias is not None:
            # Positions differ from row to row only where padding comes first.
            said[-1] += ", or for each if one is padded on the left"
        if registry.get(name).shared and any(registry.get(name).cost):
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
    """Return the costs of an encoding's parts: its own, and those of its terms."""
    parts = [registry.get(name).cost]
    for _, term, tensor in terms_of(name).given():
        groups = "h " if term.per_head(tensor) else ""
        parts.append(Cost(*(part.format(g=groups) for part in term.cost)))
    return parts


def terms_of(name: str) -> Terms:
    """Return what an encoding adds to the scores of a token."""
    causal = name not in registry.names_for(encoder=True)
    return Assembly(registry.parse(name), Dims(8, 2, 4, causal)).check("auto")
