"""The first token's own rows: a row and a column of the scores that are no function of distance.

The scores of these lines, and their gradients, are computed for a whole call at once. A block is
computed as if there were no reset; then its lines are put in their place.

Shapes: b pairs of sentence and head, of the whole call; other letters as in
:mod:`fairseq_posenc.backends.blocked.bands`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Union

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked.factors import Factors
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry
from fairseq_posenc.backends.blocked.tables import Tables

QUERY, KEY = 0, 1  # which of the two rows behind those by distance


class Line(NamedTuple):
    """A row or column of a block, in the heads of one sentence.

    Attributes:
        heads: of the chunk, those of the sentence.
        queries: of the block: one of them, or all.
        keys: all of the block's, or one of them.
        row: QUERY or KEY.
        place: among the lines of the call, ``(b, 1, S)`` or ``(b, T, 1)``.
    """

    heads: slice
    queries: slice
    keys: slice
    row: int
    place: tuple[slice, ...]

    def of(self, x: Tensor) -> Tensor:
        """Return the line in ``(c, M, W)``: ``(H, M, 1)`` or ``(H, 1, W)``, as a view."""
        return x[self.heads, self.queries, self.keys]

    def row_of(self, table: Tensor) -> Tensor:
        """Return the table's row, ``(G, 1, ...)``, as a view; both rows end the table."""
        heads = slice(None) if table.size(0) == 1 else self.heads
        return table[heads, self.row - 2, None]


def lines(geometry: Geometry, chunk: Chunk, block: Block) -> Iterator[Line]:
    """Yield the lines of the first tokens in a block; a query's stands above a key's."""
    if geometry.first is None:
        return
    heads = chunk.heads.stop - chunk.heads.start
    everything = slice(None)
    for i, sentence in enumerate(range(chunk.batch.start, chunk.batch.stop)):
        key = geometry.first[sentence]
        if key < 0:
            continue
        of_chunk = slice(i * heads, (i + 1) * heads)
        start = sentence * geometry.heads + chunk.heads.start
        of_call = slice(start, start + heads)
        if block.keys.start <= key < block.keys.stop:
            here = slice(key - block.keys.start, key - block.keys.start + 1)
            yield Line(of_chunk, everything, here, KEY, (of_call, block.queries))
        query = geometry.src_len - 1 - key
        if block.queries.start <= query < block.queries.stop:
            here = slice(query - block.queries.start, query - block.queries.start + 1)
            yield Line(of_chunk, here, everything, QUERY, (of_call, everything, block.keys))


class Reset:
    """The scores of all lines of a call; without a reset, of none.

    Args:
        geometry: of the call.
        query: ``(B, H, T, D)``, last one first.
        key: ``(B, H, S, D)``.
        tables: of all heads.
        product: how terms are combined.
    """

    def __init__(
        self, geometry: Geometry, query: Tensor, key: Tensor, tables: Tables, product: bool
    ) -> None:
        self.geometry, self.product = geometry, product
        # Whether the content is only added to: then its gradient is that of the scores.
        self.is_plain = not product and tables.gain is None
        self.scores: list[Tensor] = []
        if geometry.first is None:
            return
        self._lines: dict[tuple[int, ...], list[Line]] = {}
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        keys = [max(first, 0) for first in geometry.first]
        queries = [min(geometry.src_len - 1 - first, query.size(1) - 1) for first in keys]
        self.at_key, self.at_query = (
            _Token.of_sentences(places, geometry.heads, key.device) for places in (keys, queries)
        )
        # What all queries meet, and all keys: their two rows, and the first token itself.
        self.met_by_query = _met(tables.query_table, self.at_key.of(key))
        self.met_by_key = _met(tables.key_table, self.at_query.of(query))
        by_query, by_key = (  # a line lies in one piece
            (met @ x.transpose(1, 2)).transpose(1, 2)
            for met, x in ((self.met_by_query, query), (self.met_by_key, key))
        )
        self.factors = [
            _factors(tables, row, content, of_query, of_key)
            for row, content, of_query, of_key in (
                (QUERY, by_key[:, None, :, -1], self.at_query.of(by_query), by_key),
                (KEY, by_query[..., -1:], by_query, self.at_key.of(by_key)),
            )
        ]
        self.scores = [factors.combine(product) for factors in self.factors]
        if tables.bias is not None:
            bias = _of_heads(tables.bias, key)
            self.scores = [x + bias[:, row, None, None] for row, x in enumerate(self.scores)]

    def lines(self, chunk: Chunk, block: Block) -> list[Line]:
        """Return the lines in a block, which are looked for once a call."""
        if not self.scores:
            return []
        here = chunk.batch.start, chunk.heads.start, block.queries.start
        if here not in self._lines:
            self._lines[here] = list(lines(self.geometry, chunk, block))
        return self._lines[here]

    def put(self, line: Line, scores: Tensor) -> None:
        """Put a line in its place in the scores of a block, ``(c, M, W)``."""
        line.of(scores).copy_(self.scores[line.row][line.place])


class LineGradients:
    """Takes the gradients of lines, block by block, to queries, keys and tables.

    Args:
        reset: of the forward pass.
    """

    def __init__(self, reset: Reset) -> None:
        self.reset = reset
        self.grads = [torch.zeros_like(x) for x in reset.scores]

    def take(self, line: Line, grad: Tensor) -> None:
        """Take a line out of the gradient of a block's scores, ``(c, M, W)``, and keep it."""
        of_line = line.of(grad)
        self.grads[line.row][line.place] = of_line
        of_line.zero_()

    def finish(
        self, query: Tensor, key: Tensor, grad_query: Tensor, grad_key: Tensor, totals: Tables
    ) -> None:
        """Add what was taken to the gradients.

        Args:
            query: ``(B, H, T, D)``, last one first.
            key: ``(B, H, S, D)``.
            grad_query: to add to.
            grad_key: turned, ``(B, H, D, S)``, to add to.
            totals: of the tables, to add to; None for those that need no gradient.
        """
        if not self.grads:
            return
        reset = self.reset
        row, column = reset.factors
        of_row, of_column = self.grads
        query, key, grad_query, grad_key = (
            x.flatten(0, 1) for x in (query, key, grad_query, grad_key)
        )
        met_by_query, met_by_key = reset.met_by_query, reset.met_by_key
        if reset.is_plain:  # without the first tokens: the gradient of the content is complete
            met_by_query, met_by_key = met_by_query[:, :-1], met_by_key[:, :-1]
        by_query, by_key = (
            x.new_zeros(x.size(0), met.size(1), x.size(1)).transpose(1, 2)
            for met, x in ((met_by_query, query), (met_by_key, key))
        )
        if not reset.is_plain:
            by_query[..., -1:] = column.gradient("content", of_column, reset.product)
            by_key[:, None, :, -1] = row.gradient("content", of_row, reset.product)
        if column.by_query is not None:
            by_query[..., KEY, None] = column.gradient("by_query", of_column, reset.product)
            of_first = row.gradient("by_query", of_row, reset.product).sum(2, keepdim=True)
            reset.at_query.add(by_query[..., QUERY, None], of_first)
        if row.by_key is not None:
            by_key[:, None, :, QUERY] = row.gradient("by_key", of_row, reset.product)
            of_first = column.gradient("by_key", of_column, reset.product).sum(1, keepdim=True)
            reset.at_key.add(by_key[..., KEY, None], of_first)
        if by_query.size(2):
            grad_query.baddbmm_(by_query, met_by_query)
            of_met = by_query.transpose(1, 2) @ query
            _add_rows(totals.query_table, of_met[:, :2])
            if not reset.is_plain:
                reset.at_key.add(grad_key.transpose(1, 2), of_met[:, -1:])
        if by_key.size(2):
            grad_key.baddbmm_(met_by_key.transpose(1, 2), by_key.transpose(1, 2))
            of_met = by_key.transpose(1, 2) @ key
            _add_rows(totals.key_table, of_met[:, :2])
            if not reset.is_plain:
                reset.at_query.add(grad_query, of_met[:, -1:])
        if totals.gain is not None:
            _add_rows(totals.gain, self._of_rows("gain"))
        if totals.bias is not None:
            _add_rows(totals.bias, torch.cat([x.sum((1, 2))[:, None] for x in self.grads], 1))

    def _of_rows(self, name: str) -> Tensor:
        """Return the gradients of both rows of numbers, ``(b, 2)``."""
        lines = zip(self.reset.factors, self.grads)
        found = [x.gradient(name, grad, self.reset.product) for x, grad in lines]
        return torch.cat([x.sum((1, 2))[:, None] for x in found], 1)


class _Token(NamedTuple):
    """A place among n: the same everywhere, or one for each sentence and head, ``(b, 1, 1)``."""

    place: Union[int, Tensor]

    @classmethod
    def of_sentences(cls, places: list[int], heads: int, device: torch.device) -> _Token:
        """Return the places of sentences, in all of their heads."""
        if len(set(places)) == 1:
            return cls(places[0])
        of_heads = [place for place in places for _ in range(heads)]
        return cls(torch.tensor(of_heads, device=device)[:, None, None])

    def of(self, x: Tensor) -> Tensor:
        """Return ``(b, 1, D)`` of ``(b, n, D)``."""
        if isinstance(self.place, int):
            return x[:, self.place, None]
        return x.gather(1, self.place.expand(-1, 1, x.size(2)))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add ``(b, 1, D)`` to ``(b, n, D)``."""
        if isinstance(self.place, int):
            x[:, self.place, None].add_(y)
        else:
            x.scatter_add_(1, self.place.expand_as(y), y)


def _factors(
    tables: Tables, row: int, content: Tensor, by_query: Tensor, by_key: Tensor
) -> Factors:
    """Return what the lines of one kind are combined from, ``(b, 1, S)`` or ``(b, T, 1)``."""
    return Factors(
        content,
        None if tables.gain is None else _of_heads(tables.gain, content)[:, row, None, None],
        None if tables.query_table is None else by_query[..., row : row + 1],
        None if tables.key_table is None else by_key[:, None, :, row],
    )


def _of_heads(table: Tensor, x: Tensor) -> Tensor:
    """Return a table's two last rows for all pairs of sentence and head: ``(b, 2, ...)``."""
    rows = table[:, -2:]
    return rows.expand(x.size(0) // rows.size(0), *rows.shape).flatten(0, 1)


def _met(table: Tensor | None, first: Tensor) -> Tensor:
    """Return a table's two last rows, and first tokens ``(b, 1, D)``: ``(b, 3, D)``.

    Without a table, the first tokens alone.
    """
    return first if table is None else torch.cat([_of_heads(table, first), first], dim=1)


def _add_rows(table: Tensor | None, rows: Tensor) -> None:
    """Add ``(b, 2, ...)`` to a table's two last rows, summed over all that share them."""
    if table is not None:
        table[:, -2:].add_(rows.unflatten(0, (-1, table.size(0))).sum(0))
