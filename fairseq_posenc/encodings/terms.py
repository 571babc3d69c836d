"""The terms of the attention scores that encodings add, as data that describes itself.

With q_i and k_j the (rotated) query and key and r = j - i their distance, the score is::

    e_ij = tau_i * (scale * combine(gain_r * q_i.k_j,  q_i.Q_r,  k_j.K_r)
                    +  s_i.P_r  +  bias_r  +  bias_ij  +  c_i - c_j)

where combine is a sum or a product, scale = 1 / sqrt(scale_factor * head_dim), s is a second
projection of the tokens (their states), c is the decay of the tokens, and tau_i is the query's
temperature, 1 by default. A cap C turns e_ij into C * tanh(e_ij / C). A sink is one more score in
the softmax, with a value of zeros.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import Cost, Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Span

_TABLE_COST = Cost("2 h n u d + h n^2", "h n u + h n^2")
_GAIN_COST = Cost("h n^2", "h n^2", "", "{g}n^2")
_CHANNEL_GAIN_COST = Cost("3 h n^2 d", "2 h n^2", "", "{g}n^2")
_CONTENT_ROWS_COST = Cost("4 h n u d + 2 h n^2", "2 h n u + 2 h n^2", "4 u C^2", "2 u C")
_VALUE_TABLE_COST = Cost("h n^2 + 2 h n u d", "h n u")
_BIAS_COST = Cost("h n^2", "", "", "{g}n^2")
_STATE_TABLE_COST = Cost("2 h n u w + h n^2", "h n u + h n^2")


class Terms(NamedTuple):
    """The contribution of an encoding to the attention scores (see the module's equation).

    Tables hold a row for each distance of the span they were asked for, from low to high, or, where
    ``runs`` names them, a row for each run of distances that share it. With ``first`` (the reset of
    the first token), two rows follow: that of a query at the first token, and that of a key there
    seen from any other query.

    Attributes:
        query_table: ``(G, R, D)``, Q.
        key_table: ``(G, R, D)``, K.
        gain: ``(G, R)``, multiplies the content term.
        channel_gain: ``(G, R, D)``, multiplies the content term channel by channel.
        content_rows: ``(R, C)``, which each layer projects by its own key and query projections to
            query and key tables.
        value_table: ``(G, R, D)``, added to the value that a query attends to at a distance.
        bias: ``(G, R)``, added after scaling.
        pair_bias: ``(B or 1, G, T, S)``, added after scaling.
        state_table: ``(G, R, W)``, P, whose products with ``states`` are added after scaling.
        product: combine by product in place of the sum.
        scale_factor: c of the scale 1/sqrt(c * D); None leaves it to the others (1 if none says).
        first: ``(B or 1, S)`` of bool, the first real token of each row; None means no reset.
        decay: ``(B or 1, H, S, parts)``, parts whose sum is c; the scores of a query and its
            earlier keys get c_i - c_j. Padding has the c of the token before it.
        later_decay: c for later keys, whose scores get c_j - c_i; None where ``decay`` is for all.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
        counted_table: ``(P, D)``, a; q_i.a_p is added to the score, where p is the sum of
            sigmoid(scale * gain * q_i.k_t) over the keys t from j to i, and a_p is interpolated
            between the rows of the whole numbers around p. For causal directions.
        log_visible: ``(G,)``; the scores of a query are also multiplied by this times the logarithm
            of the number of keys that the query may see.
        visible_offset: ``(G,)``, added to that factor.
        states: ``(B, H, T, W)``, s, of the queries' tokens.
        sink: ``(G,)``, a score that takes part in the softmax, and whose weight is dropped.
        softcap: C, the limit of the scores.
        runs: by name of a table, which distances share its rows.
    """

    query_table: Annotated[Tensor | None, Term("GRD", "table", _TABLE_COST)] = None
    key_table: Annotated[Tensor | None, Term("GRD", "table", _TABLE_COST)] = None
    gain: Annotated[Tensor | None, Term("GR", "content", _GAIN_COST)] = None
    channel_gain: Annotated[Tensor | None, Term("GRD", "content", _CHANNEL_GAIN_COST)] = None
    content_rows: Annotated[Tensor | None, Term("RC", "table", _CONTENT_ROWS_COST)] = None
    value_table: Annotated[Tensor | None, Term("GRD", "values", _VALUE_TABLE_COST)] = None
    bias: Annotated[Tensor | None, Term("GR", "bias", _BIAS_COST)] = None
    pair_bias: Annotated[Tensor | None, Term("BGTS", "bias", _BIAS_COST)] = None
    state_table: Annotated[Tensor | None, Term("GRW", "states", _STATE_TABLE_COST)] = None
    product: bool = False
    scale_factor: float | None = None
    first: Tensor | None = None
    decay: Tensor | None = None
    later_decay: Tensor | None = None
    temperature: Tensor | None = None
    counted_table: Tensor | None = None
    log_visible: Tensor | None = None
    visible_offset: Tensor | None = None
    states: Tensor | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    runs: Mapping[str, Runs] = {}

    @classmethod
    def by_distance(
        cls,
        span: Span,
        bias: Callable[[Tensor], Tensor],
        scale_factor: float,
        axes: int = 1,
    ) -> Terms:
        """Add a function of the distance to the scores, or that of each axis.

        Args:
            span: of the distances.
            bias: ``(H, ...)`` at distances ``(...)``.
            scale_factor: see :class:`Terms`.
            axes: the number of axes.
        """
        if span.ids is None:
            return cls(bias=axes * bias(span.distances()), scale_factor=scale_factor)  # [H, R]
        pairs = bias(span.differences()).transpose(0, 1)  # [B or 1, H, T, S], or of each axis
        pairs = pairs.sum(-1) if span.ids.dim() == 3 else axes * pairs
        return cls(pair_bias=pairs, scale_factor=scale_factor)

    @classmethod
    def by_axis(
        cls, span: Span, tables: Tensor, find: Callable[[Tensor], Tensor], scale_factor: float
    ) -> Terms:
        """Look up the bias of the distance on each axis, and add them up.

        Args:
            span: of the distances, by ids on several axes.
            tables: ``(axes, G, R)``.
            find: the rows of distances of any shape.
            scale_factor: see :class:`Terms`.
        """
        distances = span.differences().unbind(-1)  # of each axis, [B or 1, T, S]
        biases = [table[:, find(x)] for table, x in zip(tables, distances)]
        return cls(pair_bias=sum(biases).transpose(0, 1), scale_factor=scale_factor)

    def given(self, *places: str) -> Iterator[tuple[str, Term, Tensor]]:
        """Yield name, description and tensor of the described terms that are not None.

        Args:
            *places: only those that enter there (see :class:`Term`); by default all.
        """
        for name, term in TERMS.items():
            tensor = getattr(self, name)
            if tensor is not None and (not places or term.enters in places):
                yield name, term, tensor

    @property
    def content_only(self) -> bool:
        """Whether attention is a plain scaled dot product, with or without a bias."""
        others = self.counted_table is not None or self.softcap is not None
        return not (self.product or others) and not any(self.given("content", "table", "values"))

    @property
    def has_temperature(self) -> bool:
        """Whether all scores of a query are multiplied by a number of its own."""
        return self.temperature is not None or self.log_visible is not None

    @property
    def changes_softmax(self) -> bool:
        """Whether scores are multiplied or capped, or one more takes part in the softmax."""
        return self.has_temperature or self.softcap is not None or self.sink is not None

    @property
    def multiplies(self) -> bool:
        """Whether the content term is multiplied by something."""
        return self.product or any(self.given("content"))

    @property
    def changes(self) -> bool:
        """Whether anything differs from plain attention by a table or bias."""
        return self.product or any(self.given())

    @property
    def by_ids(self) -> bool:
        """Whether tables are looked up by differences of ids, which places do not tell."""
        return any(runs.span.ids is not None for runs in self.runs.values())

    def __or__(self, other: Terms) -> Terms:
        """Combine the terms of two encodings; refuse incompatible ones."""
        if (self.first is None) != (other.first is None) and self.changes and other.changes:
            raise UserError("reset must apply to every encoding of the scores, or to none")
        if self.multiplies and other.multiplies:
            raise UserError("two encodings that multiply the scores cannot be combined")
        ours, theirs = self, other
        if ours.bias is not None and theirs.bias is not None:  # they are added up
            ours, theirs = ours.expanded("bias"), theirs.expanded("bias")
        return Terms(*map(_combine, self._fields, ours, theirs))

    def with_runs(self, runs: Runs) -> Terms:
        """Note the runs of distances that share rows, the same in all tables."""
        if runs.is_whole:
            return self
        return self._replace(
            runs={name: runs for name, term, _ in self.given() if term.rows is not None}
        )

    def expanded(self, *names: str) -> Terms:
        """Repeat rows along their runs, to a row for each distance.

        Where distances are differences of ids, a bias becomes that of pairs; others stay.

        Args:
            *names: of tables; by default all.
        """
        runs = dict(self.runs)
        tables: dict[str, Any] = {}
        made: dict[tuple[int, int], Tensor] = {}  # two tables that are the same stay so
        for name in names or self.runs:
            table, shared = getattr(self, name), runs.get(name)
            dim = TERMS[name].rows
            if table is None or shared is None or dim is None:
                continue
            if shared.span.ids is None:
                del runs[name]
                key = id(table), id(shared)
                if key not in made:
                    made[key] = shared.expand(table, dim)
                tables[name] = made[key]
            elif name == "bias":
                del runs[name]
                pairs = table[:, shared.find_pairs(self.first)].transpose(0, 1)  # [B or 1, G, T, S]
                tables["bias"] = None
                tables["pair_bias"] = pairs if self.pair_bias is None else self.pair_bias + pairs
        return self._replace(**tables, runs=runs)

    def projected(
        self, as_queries: Callable[[Tensor], Tensor], as_keys: Callable[[Tensor], Tensor]
    ) -> Terms:
        """Project content rows to tables, through a layer's own projections.

        Args:
            as_queries: ``(H, R, D)`` of ``(R, C)``, by the projection of the queries.
            as_keys: the same by that of the keys.
        """
        rows = self.content_rows
        if rows is None:
            return self
        runs = dict(self.runs)
        shared = runs.pop("content_rows", None)
        tables = Terms(query_table=as_keys(rows), key_table=as_queries(rows))  # [H, R, D]
        if shared is not None:
            tables = tables.with_runs(shared)
        return self._replace(content_rows=None, runs=runs) | tables

    def with_decay(self, decay: Tensor | None, num_heads: int) -> Terms:
        """Add the decay of a layer's own, ``(B, G, S, 2)``; further heads are of later keys."""
        if decay is None:
            return self
        earlier, later = decay[:, :num_heads], decay[:, num_heads:]
        return self | Terms(decay=earlier, later_decay=later if later.size(1) else None)

    def without_first_keys(self, count: int) -> Terms:
        """Leave out the first keys, of which a cache has dropped ``count``."""
        if not count:
            return self

        def drop_first(x: Tensor, dim: int) -> Tensor:
            # Not a slice: torch.compile makes a constant of a slice's start, a graph for each step.
            return x.narrow(dim, count, x.size(dim) - count)

        return self._map_keys(drop_first).without_first_distances(count)

    def select_keys(self, places: Tensor, tgt_len: int, src_len: int) -> Terms:
        """Leave out all keys but those at ``places``, ascending, int64 ``(K,)``.

        Args:
            places: among the S keys. The last are those of the queries; before a gap lie T - 1 keys
                that are hidden (see :meth:`~fairseq_posenc.modules.cache.Kept.with_gaps`).
            tgt_len: T.
            src_len: S.
        """
        later = torch.arange(src_len, src_len + tgt_len - 1, device=places.device)
        rows = torch.cat([places, later])  # of tables with a row for each distance
        left: dict[str, Any] = {}
        by_ids = {
            name: runs.select_keys(places)
            for name, runs in self.runs.items()
            if runs.span.ids is not None
        }
        for name, term, table in self.given():
            if term.rows is None or name in by_ids:
                continue
            number, distinct = src_len + tgt_len - 1, rows
            if (runs := self.runs.get(name)) is not None:
                number, distinct = runs.rows, runs.find(rows - (src_len - 1))
            kept, reset = table.split([number, table.size(term.rows) - number], term.rows)
            left[name] = torch.cat([kept.index_select(term.rows, distinct), reset], term.rows)
        keys = self._map_keys(lambda x, dim: x.index_select(dim, places.to(x.device)))
        return keys._replace(**left, runs=by_ids)

    def _map_keys(self, select: Callable[[Tensor, int], Tensor]) -> Terms:
        """Select keys in all fields that have them, with a function of tensor and dimension."""
        left: dict[str, Any] = {
            name: select(tensor, tensor.dim() - 1)
            for name, term, tensor in self.given()
            if term.rows is None
        }
        if self.first is not None:
            left["first"] = select(self.first, 1)
        for name in ("decay", "later_decay"):
            if (by_key := getattr(self, name)) is not None:
                left[name] = select(by_key, 2)
        return self._replace(**left)

    def without_first_distances(self, count: int) -> Terms:
        """Leave out the ``count`` lowest distances: the rows that only these need."""
        runs = dict(self.runs)
        left: dict[str, Any] = {}
        for name, term, tensor in self.given():
            if term.rows is None:
                continue
            first = count
            if name in runs:
                first, runs[name] = runs[name].without_first(count)
            left[name] = tensor.narrow(term.rows, first, tensor.size(term.rows) - first)
        return self._replace(**left, runs=runs)

    def unprojected(self, num_heads: int) -> Terms:
        """Split content rows into heads as tables, for use without a layer's projections.

        Raises:
            UserError: the rows cannot be split.
        """
        rows = self.content_rows
        if rows is not None and rows.size(-1) % num_heads:
            raise UserError(
                f"rows of width {rows.size(-1)} cannot be split into {num_heads} heads without a "
                "layer's projections: take a SelfAttention"
            )

        def split_heads(rows: Tensor) -> Tensor:
            return rows.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [H, R, D]

        return self.projected(split_heads, split_heads)


# Read from the annotations, so that a new term is one edit there.
TERMS: dict[str, Term] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(Terms, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def _combine(name: str, ours: Any, theirs: Any) -> Any:
    """Combine a field of the terms of two encodings: biases and decays add up."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if name == "product":
        return ours or theirs
    if name == "first":  # computed from the same tokens
        return ours
    if name == "scale_factor":
        if ours != theirs:
            raise UserError(
                f"two encodings scale the scores by different factors ({ours:g} and {theirs:g}): "
                "set scale_factor of one of them"
            )
        return ours
    if name in ("bias", "pair_bias"):
        return ours + theirs
    if name == "runs":
        return {**ours, **theirs}
    if name in ("decay", "later_decay"):
        sizes = torch.broadcast_shapes(ours.shape[:-1], theirs.shape[:-1])
        return torch.cat([x.expand(*sizes, -1) for x in (ours, theirs)], -1)
    term = "temperature" if name == "log_visible" else name.replace("_", " ")
    raise UserError(f"two encodings both bring a {term} to the scores: choose one of them")
