"""Combines the terms of several encodings for a layer, which has at most one of each name.

For what rows by distance are multiplied by, or added to, see :class:`RowsByDistance`. B batch,
T queries, S keys, R rows, H heads, G tables (H, or 1 for all heads), C model size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from torch import Tensor

from fairseq_posenc.encodings.term import (
    ByDistance,
    CountedRows,
    NumbersByDistance,
    NumbersByPair,
    Reset,
    RowsByDistance,
    RowsOf,
    ScaleFactor,
    ScoreCap,
    SinkScore,
    Term,
)
from fairseq_posenc.errors import UserError

AnyTerm = TypeVar("AnyTerm", bound=Term)
# Projects rows ``(R, C)`` as queries and as keys, both ``(H, R, D)``.
ProjectRows = Callable[[Tensor], tuple[Tensor, Tensor]]


class Terms(tuple[Term, ...]):
    """A tuple of terms, in which backends look up what they need.

    Where torch compiles, write ``Terms([])``, not ``Terms()``: its compiler needs an argument.

    >>> import torch
    >>> bias, scale = NumbersByDistance(torch.zeros(1, 9)), ScaleFactor(4.0)
    >>> rows = RowsByDistance(torch.zeros(1, 9, 64), of="key")
    >>> terms = Terms([bias, scale]) | Terms([rows, scale])
    >>> len(terms), terms.bias is bias, terms.rows("key") is rows, terms.find(Reset)
    (3, True, True, None)
    """

    @classmethod
    def combine(cls, parts: Iterable[Terms]) -> Terms:
        """Combine the terms of several encodings: add up biases; refuse what is incompatible."""
        parts = [part for part in parts if part]
        if len(parts) < 2:
            return parts[0] if parts else cls([])
        # Only encodings with these terms may have a reset: table rows for pairs of the first token.
        resets = [part.first is not None for part in parts if part.has(ByDistance, NumbersByPair)]
        if any(resets) and not all(resets):
            raise UserError("reset must apply to every encoding of the scores, or to none")
        if sum(part.multiplies for part in parts) > 1:
            raise UserError("two encodings that multiply the scores cannot be combined")
        if sum(part.bias is not None for part in parts) > 1:
            # They are added up, so each needs a row for each distance.
            parts = [part.expanded(lambda term: term.name == "bias") for part in parts]
        return _merge(chain(*parts))

    def __or__(self, other: Terms) -> Terms:
        """Combine two parts; see :meth:`combine`."""
        return Terms.combine([self, other])

    def map(self, change: Callable[[Tensor], Tensor]) -> Terms:
        """Change each tensor."""
        return Terms([term.map(change) for term in self])

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors by the names of their terms and fields."""
        named = [(term.name, term.tensors()) for term in self]
        return {f"{name}_{field}": x for name, fields in named for field, x in fields.items()}

    def find(self, kind: type[AnyTerm]) -> AnyTerm | None:
        """Find the first term of a class, or None."""
        return next((term for term in self if isinstance(term, kind)), None)

    def has(self, *kinds: type[Term]) -> bool:
        """Check whether there is a term of one of some classes."""
        return any(isinstance(term, kinds) for term in self)

    def without(self, *kinds: type[Term]) -> Terms:
        """Leave out the terms of some classes."""
        return Terms([term for term in self if not isinstance(term, kinds)])

    def rows(self, of: RowsOf) -> RowsByDistance | None:
        """Find the rows with this value of :attr:`RowsByDistance.of`, or None."""
        return next((x for x in self if isinstance(x, RowsByDistance) and x.of == of), None)

    @property
    def bias(self) -> NumbersByDistance | None:
        """The numbers by distance that are added, or None."""
        return next(
            (x for x in self if isinstance(x, NumbersByDistance) and not x.multiplies), None
        )

    @property
    def gain(self) -> NumbersByDistance | None:
        """The numbers by distance that multiply q_i.k_j, or None."""
        return next((x for x in self if isinstance(x, NumbersByDistance) and x.multiplies), None)

    @property
    def first(self) -> Tensor | None:
        """True for the first token of a row or document, ``(B or 1, S)``; None without a reset."""
        reset = self.find(Reset)
        return None if reset is None else reset.first

    def scale(self, head_dim: int) -> float:
        """Compute the scale of the scores, 1 / sqrt(scale_factor * D)."""
        factor = self.find(ScaleFactor)
        return float(((1.0 if factor is None else factor.factor) * head_dim) ** -0.5)

    @property
    def softcap(self) -> float | None:
        """The limit of the scores, or None."""
        cap = self.find(ScoreCap)
        return None if cap is None else cap.limit

    @property
    def product(self) -> bool:
        """Whether q_i.k_j and the products with rows are multiplied, not added."""
        return any(isinstance(x, RowsByDistance) and x.multiplies for x in self)

    @property
    def multiplies(self) -> bool:
        """Whether q_i.k_j is multiplied by something."""
        return self.product or self.gain is not None or self.rows("channel") is not None

    @property
    def is_biased_dot_product(self) -> bool:
        """Whether scores are dot products plus biases and a ``Decay``, perhaps times a factor."""
        return not (self.has(RowsByDistance, CountedRows, ScoreCap, SinkScore) or self.multiplies)

    @property
    def by_ids(self) -> bool:
        """Whether tables are looked up by differences of position ids, not of token indices."""
        return any(isinstance(term, ByDistance) and term.ids is not None for term in self)

    def expanded(self, select: Callable[[ByDistance], bool] = lambda term: True) -> Terms:
        """Repeat table rows that runs of distances share, so that each distance has its own.

        Where distances are differences of ids, a bias becomes a number for each pair; other tables
        are left unchanged, and so are terms that ``select`` does not choose.
        """
        expanded: list[Term] = []
        tables: dict[tuple[int, int], Tensor] = {}  # a table that two terms hold is expanded once
        for term in self:
            if isinstance(term, ByDistance) and (runs := term.runs) is not None and select(term):
                if term.ids is None:
                    key = id(term.table), id(runs)
                    tables[key] = tables[key] if key in tables else term.expand()
                    term = replace(term, table=tables[key], runs=None)
                elif term is self.bias:
                    # With the rows of a reset for the pairs of first tokens: [G, B or 1, T, S].
                    term = NumbersByPair(term.table[:, runs.find_pairs(self.first)].transpose(0, 1))
            expanded.append(term)
        return _merge(expanded)  # a bias that became one by pair joins another one by pair

    def projected(self, project: ProjectRows) -> Terms:
        """Replace rows of ``layer`` (DeBERTa's) by a layer's projections for queries and keys."""
        rows = self.rows("layer")
        return self if rows is None else self.with_projected(rows, *project(rows.table[0]))

    def with_projected(self, rows: RowsByDistance, as_queries: Tensor, as_keys: Tensor) -> Terms:
        """As :meth:`projected`, with rows that are projected already, both ``(H, R, D)``."""
        for_queries = RowsByDistance(as_keys, rows.runs, of="query")  # Q of q_i.Q_r
        for_keys = RowsByDistance(as_queries, rows.runs, of="key")
        return Terms([x for x in self if x is not rows]) | Terms([for_queries, for_keys])


def _merge(terms: Iterable[Term]) -> Terms:
    """Combine terms of the same name."""
    merged: dict[str, Term] = {}
    for term in terms:
        merged[term.name] = merged[term.name].add(term) if term.name in merged else term
    return Terms(list(merged.values()))
