"""The scores of a block, and its attention weights."""

from __future__ import annotations

from torch import Tensor

from fairseq_posenc.backends.blocked.bands import Band, by_distance
from fairseq_posenc.backends.blocked.factors import Factors
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry
from fairseq_posenc.backends.blocked.reset import Reset
from fairseq_posenc.backends.blocked.tables import Tables


class Scores:
    """The scores of a chunk, with masks, block by block.

    Args:
        geometry: of the call.
        chunk: which sentences and heads.
        query: ``(c, T, D)``, last one first.
        key: ``(c, S, D)``.
        tables: of the chunk's heads.
        product: how terms are combined.
        reset: of the call.
    """

    def __init__(
        self,
        geometry: Geometry,
        chunk: Chunk,
        query: Tensor,
        key: Tensor,
        tables: Tables,
        product: bool,
        reset: Reset,
    ) -> None:
        self.geometry, self.chunk, self.reset = geometry, chunk, reset
        self.query, self.key, self.tables, self.product = query, key, tables, product
        self.direction = geometry.direction_rows(query.device, query.dtype)

    def factors(self, block: Block) -> Factors:
        """Return what the scores of a block are combined from, but for the lines."""
        tables = self.tables
        query, key = self.query[:, block.queries], self.key[:, block.keys]
        content = query @ key.transpose(1, 2)
        gain = by_query = by_key = None
        if tables.gain is not None:
            gain = by_distance(tables.gain, block.corner, *content.shape[1:])
        if tables.query_table is not None:
            by_query = self.band(tables.query_table, block, query, key).scores(query)
        if tables.key_table is not None:
            by_key = self.band(tables.key_table, block, key, query).scores(key)
            by_key = by_key.permute(0, 3, 1, 2)
        if self.product:  # each is read several times: once in order
            by_query = None if by_query is None else by_query.flatten(1, 2)
            by_key = None if by_key is None else by_key.flatten(2, 3)
        return Factors(content, gain, by_query, by_key)

    def weights(self, block: Block, factors: Factors) -> Tensor:
        """Return the attention weights of a block, ``(c, M, W)``.

        Of a plain sum, the content is overwritten.
        """
        bias, direction = self.tables.bias, self.direction
        assert factors.content is not None
        scores = factors.combine(self.product)
        shape = scores.shape[1:]
        if bias is not None:
            scores.add_(by_distance(bias, block.corner, *shape))
        for line in self.reset.lines(self.chunk, block):
            self.reset.put(line, scores)
        if direction is not None:
            scores.add_(by_distance(direction[None], block.corner, *shape))
        self._add_by_pair(scores, block)
        return scores.softmax(-1)

    def band(self, table: Tensor, block: Block, own: Tensor, other: Tensor) -> Band:
        """Return the rows of a table that a block's queries, or keys, meet.

        Args:
            table: ``(G, R, D)``.
            block: of the chunk.
            own: of the side whose members meet rows, ``(c, members, D)``.
            other: of the other side.
        """
        count, members, _ = own.shape
        return Band(table, block.corner, count, members, other.size(1), self.geometry.tile)

    def by_sentence(self, x: Tensor) -> Tensor:
        """Return ``(c, M, W)`` as ``(B, H, M, W)``."""
        return x.unflatten(0, (self.chunk.batch.stop - self.chunk.batch.start, -1))

    def pairs_of(self, pair_bias: Tensor, block: Block) -> Tensor:
        """Return a block of a bias by pair, ``(B or 1, G, M, W)``, as a view."""
        batch, heads = (
            part if size > 1 else slice(None) for part, size in zip(self.chunk, pair_bias.shape)
        )
        return pair_bias[batch, heads, block.queries, block.keys]

    def _add_by_pair(self, scores: Tensor, block: Block) -> None:
        geometry = self.geometry
        if self.tables.pair_bias is not None:
            self.by_sentence(scores).add_(self.pairs_of(self.tables.pair_bias, block))
        if geometry.padding is not None:
            padding = geometry.padding[self.chunk.batch, None, None, block.keys]
            self.by_sentence(scores).add_(padding)
        if geometry.pairs is not None:
            scores.add_(geometry.pairs[block.queries, block.keys])
