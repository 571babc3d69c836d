"""What an encoding adds to the attention scores: a list of terms, each a small record of tensors.

With q_i and k_j the (rotated) query and key and r = j - i their distance, the score is::

    e_ij = tau_i * (scale * combine(gain_r * q_i.k_j,  q_i.Q_r,  k_j.K_r)
                    +  q_i.a_p  +  s_i.P_r  +  b_r  +  b_ij  +  c_i - c_j)

where combine is a sum or a product and scale = 1 / sqrt(scale_factor * head_dim). The output is the
sum of v_j + V_r by the softmax of the scores. The type of a term says where in this a tensor stands
(with the letter of this equation). A row that several distances share, such as the last one of a
clipped table, is held once: ``runs`` says which distances have which row, and None that each
distance of the span has its own, from low to high.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Span

RowsOf = Literal["query", "key", "channel", "state", "value", "layer"]


class Term(ABC):
    """Base class of all terms."""

    @abstractmethod
    def _write(self) -> Terms:
        """Write this term into the record of all terms that backends take."""


@dataclass(frozen=True)
class RowsByDistance(Term):
    """A vector for each distance, which is multiplied with or added to one of the tokens' vectors.

    ``of`` says which: ``query``, q_i.Q_r is added to q_i.k_j; ``key``, k_j.K_r is; ``channel``,
    the sum of q_it k_jt a_rt over t replaces q_i.k_j; ``state``, s_i.P_r is added after scaling;
    ``value``, v_j + V_r replaces the value v_j. The rows of ``layer``, ``(R, C)``, are projected by
    each layer like tokens: as keys they are Q, and as queries they are K.

    >>> span = Span(-4, 4, torch.device("cpu"))  # of five tokens
    >>> shaw = RowsByDistance("query", torch.ones(1, 3, 64), Runs((0, 1), span))  # r < 0, 0, > 0
    """

    of: RowsOf
    rows: Tensor  # (G, R, D); of states (G, R, W)
    runs: Runs | None = None

    def _write(self) -> Terms:
        names = {"channel": "channel_gain", "layer": "content_rows"}
        return Terms.of_table(names.get(self.of, f"{self.of}_table"), self.rows, self.runs)


@dataclass(frozen=True)
class NumbersByDistance(Term):
    """A number for each distance: b_r is added after scaling, or gain_r multiplies q_i.k_j.

    >>> numbers = torch.tensor([[0.9, 0.1, 0.5]])  # of three buckets: 2 or more back; 1 back; 0
    >>> t5 = NumbersByDistance(numbers, Runs((-1, 0), Span(-4, 0, torch.device("cpu"))))
    >>> t5.runs.expand(t5.numbers, dim=1)  # of the distances -4 to 0
    tensor([[0.9000, 0.9000, 0.9000, 0.1000, 0.5000]])
    """

    numbers: Tensor  # (G, R)
    runs: Runs | None = None
    multiplies: bool = False

    def _write(self) -> Terms:
        return Terms.of_table("gain" if self.multiplies else "bias", self.numbers, self.runs)


@dataclass(frozen=True)
class Product(Term):
    """Products with rows of queries and keys multiply q_i.k_j, and are not added to it.

    >>> m4m = [RowsByDistance(of, torch.ones(1, 5, 64)) for of in ("query", "key")] + [Product()]
    """

    def _write(self) -> Terms:
        return Terms(product=True)


@dataclass(frozen=True)
class Reset(Term):
    """Two more rows at the end of each table, for the pairs of the first token.

    One is for the first token as a query, one for it as a key that another query sees.

    >>> reset = Reset(torch.tensor([[False, True, False]]))  # of tokens that begin with padding
    """

    first: Tensor  # (B or 1, S) of bool: True for the first real token

    def _write(self) -> Terms:
        return Terms(first=self.first)


@dataclass(frozen=True)
class NumbersByPair(Term):
    """A number for each query and key: b_ij is added after scaling.

    >>> step = NumbersByPair(torch.eye(4)[None, None, -1:])  # of the last of four tokens
    """

    numbers: Tensor  # (B or 1, G, T, S)

    def _write(self) -> Terms:
        return Terms(pair_bias=self.numbers)


@dataclass(frozen=True)
class Decay(Term):
    """A difference of two numbers by token: c_i - c_j is added for an earlier key j.

    >>> alibi = Decay(-torch.arange(4.0)[None, None, :, None])  # minus the distance
    """

    earlier: Tensor  # (B or 1, H, S, parts): float32 parts, which add up to c
    later: Tensor | None = None  # a later key gets c_j - c_i of these; None: c_i - c_j of `earlier`

    def _write(self) -> Terms:
        return Terms(decay=self.earlier, later_decay=self.later)


@dataclass(frozen=True)
class Temperature(Term):
    """A factor of all scores of a query: tau_i.

    >>> log = Temperature(1 + torch.arange(4.0).log1p()[None, None])  # sharper from query to query
    """

    factors: Tensor  # (B or 1, G, T)

    def _write(self) -> Terms:
        return Terms(temperature=self.factors)


@dataclass(frozen=True)
class CountTemperature(Term):
    """A factor of all scores of a query i that sees n_i keys: offset + factor * ln(n_i).

    >>> ssmax = CountTemperature(torch.full((2,), 0.2))  # of two heads; 1 for 148 keys
    """

    factor: Tensor  # (G,)
    offset: Tensor | None = None  # (G,)

    def _write(self) -> Terms:
        return Terms(log_visible=self.factor, visible_offset=self.offset)


@dataclass(frozen=True)
class CountedRows(Term):
    """Products of queries with rows by a position that depends on the scores: q_i.a_p.

    The position p of key j is the sum of sigmoid(scale * gain * q_i.k_t) over the keys t from j to
    i; a_p is interpolated between the rows of the whole numbers around p. For causal models.

    >>> cope = CountedRows(torch.zeros(64, 32))  # positions 0 to 63 of heads of width 32
    """

    rows: Tensor  # (P, D)

    def _write(self) -> Terms:
        return Terms(counted_table=self.rows)


@dataclass(frozen=True)
class SinkScore(Term):
    """One more score in the softmax of a query, whose weight is dropped.

    >>> sink = SinkScore(torch.zeros(8))  # of 8 heads: softmax of the scores and of a 0
    """

    score: Tensor  # (G,)

    def _write(self) -> Terms:
        return Terms(sink=self.score)


@dataclass(frozen=True)
class ScoreCap(Term):
    """A limit C of the scores: e_ij becomes C * tanh(e_ij / C).

    >>> softcap = ScoreCap(50.0)  # a score of 100 becomes 48.2
    """

    limit: float

    def _write(self) -> Terms:
        return Terms(softcap=self.limit)


def combine(terms: Iterable[Term], scale_factor: float | None = None) -> Terms:
    """Combine terms to the record that backends take; see :class:`Terms` for the scale factor."""
    return reduce(or_, (term._write() for term in terms), Terms(scale_factor=scale_factor))


def add_axes(span: Span, tables: Tensor, find: Callable[[Tensor], Tensor]) -> NumbersByPair:
    """Look up a number by the distance on each axis, and add up those of all axes.

    Args:
        span: the distances of the call, with ids on several axes.
        tables: the numbers of each axis, ``(axes, G, R)``.
        find: finds the row of each distance, for distances of any shape.
    """
    distances = span.differences().unbind(-1)  # for each axis [B or 1, T, S]
    numbers = [table[:, find(x)] for table, x in zip(tables, distances)]  # [G, B or 1, T, S]
    return NumbersByPair(torch.stack(numbers).sum(0).transpose(0, 1))
