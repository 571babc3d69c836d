"""What encodings add to the attention scores: a tuple of terms, each a small record of tensors.

With q_i and k_j the (rotated) query and key and r = j - i their distance, the score is::

    e_ij = tau_i * (scale * combine(gain_r * q_i.k_j,  q_i.Q_r,  k_j.K_r)
                    +  q_i.a_p  +  s_i.P_r  +  b_r  +  b_ij  +  c_i - c_j)

where combine is a sum or a product and scale = 1 / sqrt(scale_factor * head_dim). The output is the
sum of v_j + V_r, weighted by the softmax of the scores. The type of a term says which part of it a
tensor is; :mod:`~fairseq_posenc.encodings.terms` combines the terms of several encodings.

B batch, T queries, S keys, H heads, G tables or sets of numbers (H, or 1 that all heads share), R
rows of a table by distance, D head size, C model size, W width of a state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self  # typing has it from Python 3.11 on

from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.errors import UserError

# What rows are multiplied by or added to: see `RowsByDistance`.
RowsOf = Literal["query", "key", "channel", "state", "value", "layer"]


@dataclass(frozen=True, eq=False)
class Term:
    """Base class of all terms."""

    label: ClassVar[str]  # the default of `name`
    letters: ClassVar[str] = ""  # of the dimensions of its tensors, such as BHTS; see `map_axis`

    @property
    def name(self) -> str:
        """The name of the term in messages and plots."""
        return self.label

    def tensors(self) -> dict[str, Tensor]:
        """List the term's tensors by the names of its fields."""
        values = {x.name: getattr(self, x.name) for x in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change each tensor."""
        changed: dict[str, Tensor] = {name: change(x) for name, x in self.tensors().items()}
        return replace(self, **changed)

    def map_axis(self, axis: str, change: Callable[[Tensor, int], Tensor]) -> Self:
        """Change each tensor that has an axis, given the tensor and the axis's dimension."""
        if axis not in self.letters:
            return self
        return self.map(lambda x: change(x, self.letters.index(axis)))

    def without_dropped_keys(self, count: int) -> Self:
        """Leave out the first ``count`` keys, which a cache has dropped."""
        # Not a slice, whose start would be a constant of torch.compile's graph: one per step.
        return self.map_axis("S", lambda x, dim: x.narrow(dim, count, x.size(dim) - count))

    def select_keys(self, places: Tensor, tgt_len: int, src_len: int) -> Self:
        """Keep only the keys at ``places``, ascending, ``(K,)``; they include the last T."""
        # Terms by distance also need the sizes of the call: `tgt_len` is T, `src_len` S.
        return self.map_axis("S", lambda x, dim: x.index_select(dim, places.to(x.device)))

    def add(self, other: Self) -> Self:
        """Combine with a term of the same name, of another encoding; by default refuse it."""
        words = self.name.replace("_", " ")
        noun = words if words.endswith("s") else f"a {words}"
        raise UserError(f"two encodings both have {noun}: choose one of them")


@dataclass(frozen=True, eq=False)
class ByDistance(Term):
    """Base class of terms with a table by distance, ``(G, R, ...)``, from low distances to high.

    A row that several distances share, such as the last one of a clipped table, is held once:
    ``runs`` says which distances have which row, and None that each distance of the call has its
    own. With a :class:`Reset`, two more rows follow.
    """

    table: Tensor
    runs: Runs | None = None

    @property
    def per_head(self) -> bool:
        """Whether rows differ from head to head."""
        return self.table.size(0) > 1

    @property
    def ids(self) -> Tensor | None:
        """Positions of the tokens whose differences are the distances; None: order of tokens."""
        return None if self.runs is None else self.runs.ids

    def expand(self) -> Tensor:
        """Repeat rows along their runs, so that each distance has a row."""
        return self.table if self.runs is None else self.runs.expand(self.table)

    def without_dropped_keys(self, count: int) -> Self:
        """Leave out the ``count`` lowest distances, and the rows that no other distance has."""
        # The number of rows to leave out, and the runs of the others.
        dropped, runs = (count, None) if self.runs is None else self.runs.without_first(count)
        table = self.table.narrow(1, dropped, self.table.size(1) - dropped)
        return replace(self, table=table, runs=runs)

    def select_keys(self, places: Tensor, tgt_len: int, src_len: int) -> Self:
        """Keep the rows of the keys at ``places``: see :meth:`Term.select_keys`.

        A query reads neighboring rows, in the order of its keys; the query before it begins one
        row later. So the last query's rows are kept, and T - 1 more: with S = 8, T = 2 and the
        places 0 1 2 5 6 7, the rows of the distances -7 -6 -5 -2 -1 0 and 1. The query before the
        last one would then read row -2 for key 2, which is 4 away: so the last T - 1 keys before a
        gap must be hidden (``Kept.with_gaps`` does it). ``look_up`` keeps a reset's rows last.
        """
        if self.runs is not None and self.runs.ids is not None:
            return replace(self, runs=self.runs._replace(ids=self.runs.ids[:, places]))
        low, high = 1 - src_len, tgt_len - 1
        runs = self.runs or Runs(range(low + 1, high + 1), low, high)  # a row for each distance
        after_last = torch.arange(1, tgt_len, device=places.device)
        distances = torch.cat([places - (src_len - 1), after_last])  # of the last query's rows
        return replace(self, table=runs.look_up(self.table, distances), runs=None)


@dataclass(frozen=True, eq=False)
class NumbersByDistance(ByDistance):
    """A number for each distance: b_r is added after scaling, or gain_r multiplies q_i.k_j.

    >>> numbers = torch.tensor([[0.9, 0.1, 0.5]])  # of three buckets: 2 or more back; 1 back; 0
    >>> t5 = NumbersByDistance(numbers, Runs((-1, 0), low=-4, high=0))
    >>> t5.expand()  # of the distances -4 to 0
    tensor([[0.9000, 0.9000, 0.9000, 0.1000, 0.5000]])

    The table is ``(G, R)``; ``multiplies``: whether its numbers are gain_r, not b_r.
    """

    multiplies: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``bias``, or ``gain`` if the numbers multiply."""
        return "gain" if self.multiplies else "bias"

    def add(self, other: Self) -> Self:
        """Add up two biases, which ``Terms`` has expanded to all distances; refuse two gains."""
        if self.multiplies:
            return super().add(other)
        return replace(self, table=self.table + other.table)


@dataclass(frozen=True, eq=False)
class RowsByDistance(ByDistance):
    """A vector for each distance, which is multiplied by or added to one of the tokens' vectors.

    ``of`` says which: ``query``: q_i.Q_r is added to q_i.k_j; ``key``: k_j.K_r is added to it;
    ``channel``: the sum of q_it k_jt a_rt over t replaces q_i.k_j; ``state``: s_i.P_r is added
    after scaling; ``value``: v_j + V_r replaces the value v_j. The rows of ``layer``, ``(1, R,
    C)``, are projected by each layer like tokens: as keys they are Q, and as queries K. With
    ``multiplies``, products with rows of ``query`` and ``key`` multiply q_i.k_j instead.

    >>> runs = Runs((0, 1), low=-4, high=4)  # of five tokens: r < 0, r = 0, r > 0
    >>> shaw = RowsByDistance(torch.ones(1, 3, 64), runs, of="query")

    The table is ``(G, R, D)``; that of states ``(G, R, W)``.
    """

    of: RowsOf = field(kw_only=True)
    multiplies: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """The name by ``of``, such as ``query_table``."""
        return "channel_gain" if self.of == "channel" else f"{self.of}_table"


@dataclass(frozen=True, eq=False)
class ScaleFactor(Term):
    """The factor c of the scale 1 / sqrt(c * D); without this term it is 1."""

    factor: float
    label = "scale_factor"

    def add(self, other: Self) -> Self:
        """Refuse another factor."""
        if self.factor != other.factor:
            raise UserError(
                f"two encodings scale the scores by different factors ({self.factor:g} and "
                f"{other.factor:g}): set scale_factor of one of them"
            )
        return self


@dataclass(frozen=True, eq=False)
class Reset(Term):
    """Two more rows at the end of each table, for the pairs of the first token.

    The one before the last is for it as a query, the last for it as a key that another query sees.
    """

    first: Tensor  # (B or 1, S) of bool: True for the first real token
    label = "reset"
    letters = "BS"

    def add(self, other: Self) -> Self:
        """Return either of two, which were computed from the same tokens."""
        return self


@dataclass(frozen=True, eq=False)
class NumbersByPair(Term):
    """A number for each query and key: b_ij is added after scaling."""

    numbers: Tensor  # (B or 1, G, T, S)
    label = "pair_bias"
    letters = "BGTS"

    def add(self, other: Self) -> Self:
        """Add up the numbers."""
        return replace(self, numbers=self.numbers + other.numbers)


def sum_over_axes(tables: Tensor, runs: Runs | None) -> NumbersByDistance | NumbersByPair:
    """Add up the numbers of the distances on each axis of the positions, ``(axes, G, R)``."""
    if runs is None or runs.ids is None or runs.ids.dim() == 2:  # one distance for all axes
        return NumbersByDistance(tables.sum(0), runs)
    rows = runs.find_pairs(first=None)  # no reset; [B or 1, T, S, axes]
    numbers = [table[:, x] for table, x in zip(tables, rows.unbind(-1))]  # [G, B or 1, T, S] each
    return NumbersByPair(torch.stack(numbers).sum(0).transpose(0, 1))


@dataclass(frozen=True, eq=False)
class States(Term):
    """Vectors s of the queries, multiplied by rows of ``state`` (in the encoding ``inkling``)."""

    vectors: Tensor  # (B, H, T, W)
    label = "states"
    letters = "BHTW"


@dataclass(frozen=True, eq=False)
class Decay(Term):
    """A difference of two numbers by token: c_i - c_j is added for an earlier key j.

    Padding has the c of the token before it.

    >>> alibi = Decay(-torch.arange(4.0)[None, None, :, None])  # c_i - c_j = -(i - j)
    """

    earlier: Tensor  # (B or 1, H, S, parts): float32 parts, which add up to c
    later: Tensor | None = None  # a later key gets c_j - c_i of these; None: c_i - c_j of `earlier`
    label = "decay"
    letters = "BHSp"  # p: the parts

    def add(self, other: Self) -> Self:
        """Join the parts of both sums: all of them add up to the new sum."""
        ours, theirs = self.tensors(), other.tensors()
        if len(ours) != len(theirs):
            raise UserError(
                "two encodings have a decay, and only one has another for later keys: choose one"
            )
        joined: dict[str, Tensor] = {}
        for name, x in ours.items():
            sizes = torch.broadcast_shapes(x.shape[:-1], theirs[name].shape[:-1])
            joined[name] = torch.cat([y.expand(*sizes, -1) for y in (x, theirs[name])], -1)
        return replace(self, **joined)


@dataclass(frozen=True, eq=False)
class Temperature(Term):
    """A factor of all scores of a query: tau_i."""

    factors: Tensor  # (B or 1, G, T)
    label = "temperature"
    letters = "BGT"


@dataclass(frozen=True, eq=False)
class CountTemperature(Term):
    """A factor of all scores of a query i that sees n_i keys: offset + factor * ln(n_i).

    >>> ssmax = CountTemperature(torch.full((2,), 0.2))  # of two heads; about 1 for 148 keys
    """

    factor: Tensor  # (G,)
    offset: Tensor | None = None  # (G,)
    label = "count_temperature"


@dataclass(frozen=True, eq=False)
class CountedRows(Term):
    """Products of queries with rows by a position that depends on the scores: q_i.a_p.

    The position p of key j is the sum of sigmoid(scale * gain * q_i.k_t) over the keys t from j to
    i; a_p is interpolated between the rows of the whole numbers around p. For causal models.
    """

    rows: Tensor  # (P, D): of the positions 0 to P - 1
    label = "counted_table"


@dataclass(frozen=True, eq=False)
class SinkScore(Term):
    """One more score in the softmax of a query, whose weight is dropped."""

    score: Tensor  # (G,)
    label = "sink"


@dataclass(frozen=True, eq=False)
class ScoreCap(Term):
    """A limit C of the scores: e_ij becomes C * tanh(e_ij / C); with C = 50, 100 becomes 48.2."""

    limit: float
    label = "softcap"
