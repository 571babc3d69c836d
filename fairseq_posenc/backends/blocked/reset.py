"""The first token's own rows: a row and a column of the scores that are no function of distance.

A block is computed as if there were no reset. Then the line of the first token's key, and the line
of its query, are put in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.factors import Factors
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry
from fairseq_posenc.backends.blocked.tables import Tables

QUERY, KEY = 0, 1  # which of the two rows behind those by distance


class Line(NamedTuple):
    """A row or column of a block, in all heads of one sentence.

    Attributes:
        heads: of the chunk, those of the sentence.
        queries: of the block: one of them, or all.
        keys: all of the block's, or one of them.
        row: of the tables.
    """

    heads: slice
    queries: slice
    keys: slice
    row: int

    def of(self, x: Tensor) -> Tensor:
        """Return the line in ``(c, M, W)``: ``(H, M, 1)`` or ``(H, 1, W)``, as a view."""
        return x[self.heads, self.queries, self.keys]

    def row_of(self, table: Tensor) -> Tensor:
        """Return the table's row, ``(G, 1, ...)``, as a view."""
        heads = slice(None) if table.size(0) == 1 else self.heads
        return table[heads, self.row, None]

    def factors(self, query: Tensor, key: Tensor, tables: Tables, content: Tensor) -> Factors:
        """Return what the line's scores are combined from.

        Args:
            query: of the block, ``(c, M, D)``.
            key: of the block, ``(c, W, D)``.
            tables: of the chunk.
            content: of the block, ``(c, M, W)``.
        """
        query, key = query[self.heads, self.queries], key[self.heads, self.keys]
        gain = by_query = by_key = None
        if tables.gain is not None:
            gain = self.row_of(tables.gain)[:, None]
        if tables.query_table is not None:
            by_query = (query * self.row_of(tables.query_table)).sum(2, keepdim=True)
        if tables.key_table is not None:
            by_key = (key * self.row_of(tables.key_table)).sum(2)[:, None]
        return Factors(self.of(content).clone(), gain, by_query, by_key)


def lines(geometry: Geometry, chunk: Chunk, block: Block) -> Iterator[Line]:
    """Yield the lines of the first tokens in a block; a query's stands above a key's."""
    if geometry.first is None:
        return
    heads = chunk.heads.stop - chunk.heads.start
    everything = slice(None)
    for sentence, key in enumerate(geometry.first[chunk.batch]):
        if key < 0:
            continue
        of_sentence = slice(sentence * heads, (sentence + 1) * heads)
        if block.keys.start <= key < block.keys.stop:
            here = key - block.keys.start
            yield Line(of_sentence, everything, slice(here, here + 1), geometry.rows + KEY)
        query = geometry.src_len - 1 - key
        if block.queries.start <= query < block.queries.stop:
            here = query - block.queries.start
            yield Line(of_sentence, slice(here, here + 1), everything, geometry.rows + QUERY)
