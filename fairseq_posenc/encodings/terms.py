"""The record of all terms that the encodings of a layer add to its scores, as backends take it.

:mod:`~fairseq_posenc.encodings.term` has the equation, and what each term adds to it. The letters
of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Span


class Field(NamedTuple):
    """The description of a tensor field of :class:`Terms`.

    Attributes:
        axes: the shape, a letter for each dimension (see :mod:`~fairseq_posenc.encodings.base`); B
            may be 1 as well.
        enters: the place in the equation. ``content``: it multiplies the content term; ``table``:
            its dot products are added or multiplied; ``bias``: it is added after scaling;
            ``states``: its products with states are added after scaling; ``values``: it is added to
            the values.
    """

    axes: str
    enters: Literal["content", "table", "bias", "states", "values"]

    @property
    def rows(self) -> int | None:
        """The dimension with a row for each distance; None if the term has no such rows."""
        return self.axes.index("R") if "R" in self.axes else None

    @property
    def has_vectors(self) -> bool:
        """Whether a row is a vector, multiplied with queries or keys, and not a number."""
        return self.axes[-1] in "DCW"

    def per_head(self, tensor: Tensor) -> bool:
        """Check whether a tensor of this term differs from head to head."""
        return "G" in self.axes and tensor.size(self.axes.index("G")) > 1


class Terms(NamedTuple):
    """All terms of a layer, as backends take them.

    Encodings declare :mod:`~fairseq_posenc.encodings.term`, and each is a field here. Two records
    combine with ``|``. Tables have a row for each distance of the requested span, from
    low to high; those named in ``runs`` have a row for each run of distances that share it. With
    ``first`` (the reset of the first token), two rows follow: one for a query at the first token,
    and one for a key at the first token seen from any other query.

    Attributes:
        product: whether the three terms of ``combine`` are multiplied, not added.
        scale_factor: c of the scale 1/sqrt(c * D); None if no encoding sets it. It is 1 then.
        decay: parts that add up to c (each is exact in float32, c may not be). Padding has the c of
            the token before it.
        later_decay: None if c_i - c_j of ``decay`` is added for all keys.
        states: ``(B, H, T, W)``, s, of the queries' tokens.
        runs: the runs of distances that share rows, by the name of the table.
    """

    query_table: Annotated[Tensor | None, Field("GRD", "table")] = None
    key_table: Annotated[Tensor | None, Field("GRD", "table")] = None
    gain: Annotated[Tensor | None, Field("GR", "content")] = None
    channel_gain: Annotated[Tensor | None, Field("GRD", "content")] = None
    content_rows: Annotated[Tensor | None, Field("RC", "table")] = None
    value_table: Annotated[Tensor | None, Field("GRD", "values")] = None
    bias: Annotated[Tensor | None, Field("GR", "bias")] = None
    pair_bias: Annotated[Tensor | None, Field("BGTS", "bias")] = None
    state_table: Annotated[Tensor | None, Field("GRW", "states")] = None
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

    def scale(self, head_dim: int) -> float:
        """Compute the scale of the scores, 1 / sqrt(scale_factor * D)."""
        factor = 1.0 if self.scale_factor is None else self.scale_factor
        return float((factor * head_dim) ** -0.5)

    def present(self, *places: str) -> Iterator[tuple[str, Field, Tensor]]:
        """Yield the name, description and tensor of each term in ``TERMS`` that is present.

        Args:
            *places: the places in the equation where the term may enter (see :class:`Field`); by
                default, all.
        """
        for name, term in TERMS.items():
            tensor = getattr(self, name)
            if tensor is not None and (not places or term.enters in places):
                yield name, term, tensor

    @property
    def is_biased_dot_product(self) -> bool:
        """Whether scores are scaled dot products and a sum of biases, states and decays.

        They may be multiplied by a temperature, and a sink may take part in the softmax.
        """
        if self.product or self.counted_table is not None or self.softcap is not None:
            return False
        return not any(self.present("content", "table", "values"))

    @property
    def has_temperature(self) -> bool:
        """Whether all scores of a query are multiplied by a factor."""
        return self.temperature is not None or self.log_visible is not None

    @property
    def changes_softmax(self) -> bool:
        """Whether scores are multiplied or capped, or one more takes part in the softmax."""
        return self.has_temperature or self.softcap is not None or self.sink is not None

    @property
    def multiplies(self) -> bool:
        """Whether the content term is multiplied by something."""
        return self.product or any(self.present("content"))

    @property
    def has_score_terms(self) -> bool:
        """Whether there is a product or one of ``TERMS``."""
        return self.product or any(self.present())

    @property
    def by_ids(self) -> bool:
        """Whether tables are looked up by differences of position ids, not of token indices."""
        return any(runs.span.ids is not None for runs in self.runs.values())

    def __or__(self, other: Terms) -> Terms:
        """Combine the terms of two encodings; refuse incompatible ones."""
        both = self.has_score_terms and other.has_score_terms
        if both and (self.first is None) != (other.first is None):
            raise UserError("reset must apply to every encoding of the scores, or to none")
        if self.multiplies and other.multiplies:
            raise UserError("two encodings that multiply the scores cannot be combined")
        ours, theirs = self, other
        if self.bias is not None and other.bias is not None:
            # They are added up, so both need a row for each distance.
            ours, theirs = self.expanded("bias"), other.expanded("bias")
        return Terms(*map(_combine, self._fields, ours, theirs))

    @classmethod
    def of_table(cls, name: str, table: Tensor, runs: Runs | None = None) -> Terms:
        """Make terms with one table by distance, the field ``name``."""
        terms = cls()._replace(**{name: table})  # type: ignore[arg-type]
        return terms if runs is None else terms.with_runs(runs)

    def with_runs(self, runs: Runs) -> Terms:
        """Set the runs of distances that share rows, for all tables."""
        if runs.is_whole:
            return self
        return self._replace(
            runs={name: runs for name, term, _ in self.present() if term.rows is not None}
        )

    def expanded(self, *names: str) -> Terms:
        """Repeat rows along their runs, so that each distance has a row.

        Where distances are differences of ids, a bias becomes ``pair_bias``; other tables are left
        unchanged.

        Args:
            *names: the names of the tables to expand; by default, all.
        """
        runs = dict(self.runs)
        tables: dict[str, Any] = {}
        for name in names or self.runs:
            table = getattr(self, name)
            table_runs = runs.get(name)
            dim = TERMS[name].rows
            if table is None or table_runs is None or dim is None:
                continue
            if table_runs.span.ids is None:
                del runs[name]
                # A table that two fields hold is expanded once.
                holders = (other for other in tables if getattr(self, other) is table)
                same = next((x for x in holders if self.runs[x] is table_runs), None)
                tables[name] = table_runs.expand(table, dim) if same is None else tables[same]
            elif name == "bias":
                del runs[name]
                index = table_runs.find_pairs(self.first)
                pairs = table[:, index].transpose(0, 1)  # [B or 1, G, T, S]
                tables["bias"] = None
                tables["pair_bias"] = pairs if self.pair_bias is None else self.pair_bias + pairs
        return self._replace(**tables, runs=runs)

    def projected(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Terms:
        """Project content rows to tables with the projections of a layer.

        Args:
            project: projects rows ``(R, C)`` as queries and as keys, both ``(H, R, D)``.
        """
        rows = self.content_rows
        if rows is None:
            return self
        runs = dict(self.runs)
        content_runs = runs.pop("content_rows", None)
        as_queries, as_keys = project(rows)
        tables = Terms(query_table=as_keys, key_table=as_queries)
        if content_runs is not None:
            tables = tables.with_runs(content_runs)
        return self._replace(content_rows=None, runs=runs) | tables

    def with_decay(self, decay: Tensor | None, num_heads: int) -> Terms:
        """Add the decay of a layer, ``(B, H, S, 2)``, or ``(B, 2 H, S, 2)`` with later keys'."""
        if decay is None:
            return self
        earlier, later = decay[:, :num_heads], decay[:, num_heads:]
        return self | Terms(decay=earlier, later_decay=later if later.size(1) else None)

    def without_first_keys(self, count: int) -> Terms:
        """Leave out the first ``count`` keys, which a cache has dropped."""
        if not count:
            return self

        def drop_first(x: Tensor, dim: int) -> Tensor:
            # Not a slice, whose start would be a constant of torch.compile's graph: one per step.
            return x.narrow(dim, count, x.size(dim) - count)

        return self._map_keys(drop_first).without_first_distances(count)

    def select_keys(self, places: Tensor, tgt_len: int, src_len: int) -> Terms:
        """Keep only the keys at ``places``, ascending, int64 ``(K,)``.

        In a table by distance, a query's rows are neighbours, in the order of its keys; those of
        the query before it begin one row later. So the last query's rows are kept, and T - 1 more:
        with S = 8, T = 2 and the places 0 1 2 5 6 7 those of the distances -7 -6 -5 -2 -1 0 and 1.
        For the query before the last one, row -6 is that of key 0, row -5 that of key 1, but row -2
        is that of key 2, which is 4 away: the T - 1 last places of each run are those of hidden
        keys (:meth:`~fairseq_posenc.modules.cache.Kept.with_gaps`).

        Args:
            places: the indices among the S keys; the last ones are those of the queries.
            tgt_len: T.
            src_len: S.
        """
        span = Span.from_lengths(tgt_len, src_len, places.device)
        after_last = torch.arange(1, tgt_len, device=places.device)
        distances = torch.cat([places - (src_len - 1), after_last])  # of the last query's rows
        a_row_each = Runs(range(span.low + 1, span.high + 1), span)  # of tables without runs
        tables: dict[str, Any] = {}
        runs_by_ids: dict[str, Runs] = {}
        for name, term, table in self.present():
            if term.rows is None:
                continue
            runs = self.runs.get(name, a_row_each)
            if runs.span.ids is not None:
                runs_by_ids[name] = runs.select_keys(places)
            else:
                tables[name] = runs.look_up(table, term.rows, distances)
        selected = self._map_keys(lambda x, dim: x.index_select(dim, places.to(x.device)))
        # `tables` have a row for each distance now, so no runs.
        return selected._replace(**tables, runs=runs_by_ids)

    def _map_keys(self, select: Callable[[Tensor, int], Tensor]) -> Terms:
        """Apply ``select`` to each field that has a dimension S, and to this dimension."""
        selected: dict[str, Any] = {
            name: select(tensor, term.axes.index("S"))
            for name, term, tensor in self.present()
            if "S" in term.axes
        }
        if self.first is not None:
            selected["first"] = select(self.first, 1)
        for name in ("decay", "later_decay"):
            if (by_key := getattr(self, name)) is not None:
                selected[name] = select(by_key, 2)
        return self._replace(**selected)

    def without_first_distances(self, count: int) -> Terms:
        """Leave out the ``count`` lowest distances, with the rows that only these need."""
        runs = dict(self.runs)
        tables: dict[str, Any] = {}
        for name, term, tensor in self.present():
            if term.rows is None:
                continue
            dropped = count
            if name in runs:
                dropped, runs[name] = runs[name].without_first(count)
            tables[name] = tensor.narrow(term.rows, dropped, tensor.size(term.rows) - dropped)
        return self._replace(**tables, runs=runs)

    def unprojected(self, num_heads: int) -> Terms:
        """Split content rows into heads as tables, as if a layer's projections changed nothing.

        Raises:
            UserError: the rows cannot be split into so many heads.
        """
        rows = self.content_rows
        if rows is not None and rows.size(-1) % num_heads:
            raise UserError(
                f"rows of width {rows.size(-1)} cannot be split into {num_heads} heads without a "
                "layer's projections: take a SelfAttention"
            )

        def split_heads(rows: Tensor) -> tuple[Tensor, Tensor]:
            heads = rows.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [H, R, D]
            return heads, heads

        return self.projected(split_heads)


# Fields with a description in their annotation, so that a new term is one edit there.
TERMS: dict[str, Field] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(Terms, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
# Terms by query or by token: unlike those by distance or by pair, they cannot be computed for later
# steps of decoding.
TERMS_BY_TOKEN = ("temperature", "decay", "later_decay")


def _combine(name: str, ours: Any, theirs: Any) -> Any:
    """Combine a field of the terms of two encodings."""
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
    if name in ("decay", "later_decay"):  # parts of a sum: all of them together
        sizes = torch.broadcast_shapes(ours.shape[:-1], theirs.shape[:-1])
        return torch.cat([x.expand(*sizes, -1) for x in (ours, theirs)], -1)
    # `log_visible` comes before `visible_offset`, the other field of such a temperature.
    words = {"log_visible": "a temperature", "content_rows": "content rows", "states": "states"}
    term = words.get(name, f"a {name.replace('_', ' ')}")
    raise UserError(f"two encodings both bring {term} to the scores: choose one of them")
