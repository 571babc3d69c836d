"""Tables by distance beside a block of scores, without an index.

Queries are stored last one first: then query i' and key j have the distance of table row i' + j,
and what belongs to a block of M queries and W keys is the run of M + W - 1 rows that begins at its
corner. A product of one side with that run holds, in the row of each member, the scores moved by
its place. A view with strides undoes the move: nothing is copied or gathered, forward or backward.

Shapes: c pairs of sentence and head, M queries, W keys, and the letters of
:mod:`fairseq_posenc.encodings.base`. A table ``(G, R, D)`` is shared by all (G = 1) or has G = c.
"""

from __future__ import annotations

import math

from torch import Tensor

TILE = 64  # queries whose pairs are summed together


def by_distance(numbers: Tensor, corner: int, queries: int, keys: int) -> Tensor:
    """Return the numbers ``(G, R)`` of each pair of a block, as a view ``(G, M, W)``.

    Args:
        numbers: one for each distance, contiguous.
        corner: row of the block's first query and key.
        queries: M.
        keys: W.
    """
    shape = (numbers.size(0), queries, keys)
    return numbers.as_strided(shape, (numbers.size(1), 1, 1), numbers.storage_offset() + corner)


def sum_by_distance(x: Tensor) -> Tensor:
    """Return the sums ``(G, M + W - 1)`` over the pairs of equal distance in ``(G, M, W)``.

    First within tiles of queries, which leaves fewer zeros to add up.
    """
    tile = math.gcd(x.size(1), TILE)
    within = _sum_moved(x.unflatten(1, (-1, tile)), 1)
    return _sum_moved(within, tile)


def _sum_moved(x: Tensor, step: int) -> Tensor:
    """Return the sum of rows, each moved by ``step`` from the one before: ``(..., N, W)``."""
    *outer, rows, width = x.shape
    wide = x.new_zeros(*outer, rows, (rows - 1) * step + width)
    *strides, to_next, _ = wide.stride()
    wide.as_strided(x.shape, (*strides, to_next + step, 1)).copy_(x)
    return wide.sum(-2)


class Band:
    """The rows of a table that a block meets, tile by tile of one side, its members.

    A member meets only as many rows as the other side has; tiles of N members keep down what is
    computed beside them.

    Args:
        table: ``(G, R, D)``, contiguous.
        corner: row of the block's first query and key.
        count: c.
        members: of this side of the block, a multiple of N.
        others: of the other side.
        tile: N.
    """

    def __init__(
        self, table: Tensor, corner: int, count: int, members: int, others: int, tile: int
    ) -> None:
        self.corner, self.count, self.others, self.tile = corner, count, others, tile
        self.groups, _, width = table.shape
        self.tiles = members // tile
        self.rows = table.as_strided(  # [G, tiles, N + others - 1, D]
            (self.groups, self.tiles, tile + others - 1, width),
            (table.stride(0), tile * width, width, 1),
            table.storage_offset() + corner * width,
        )

    def scores(self, own: Tensor) -> Tensor:
        """Return the products of members ``(c, members, D)``, a view ``(c, tiles, N, others)``."""
        return self._pairs(self._tiled(own) @ self.rows.transpose(2, 3))

    def spread(self, weights: Tensor) -> Tensor:
        """Return weights of pairs, ``(c, tiles, N, others)``, by row, with zeros elsewhere."""
        shape = self.groups, self.tiles, self.count // self.groups * self.tile, self.rows.size(2)
        wide = weights.new_zeros(shape)
        self._pairs(wide).copy_(weights)
        return wide

    def sums(self, wide: Tensor) -> Tensor:
        """Return the weighted sums of rows for each member, ``(c, members, D)``.

        Args:
            wide: weights, see :meth:`spread`.
        """
        sums = (wide @ self.rows).unflatten(2, (-1, self.tile))
        return sums.transpose(1, 2).reshape(self.count, self.tiles * self.tile, -1)

    def turned_sums(self, wide: Tensor) -> Tensor:
        """Return :meth:`sums` turned, ``(c, D, members)``."""
        sums = (self.rows.transpose(2, 3) @ wide.transpose(2, 3)).unflatten(3, (-1, self.tile))
        return sums.permute(0, 3, 2, 1, 4).reshape(self.count, -1, self.tiles * self.tile)

    def add_to(self, table: Tensor, wide: Tensor, own: Tensor) -> None:
        """Add the weighted sums of members ``(c, members, D)`` to the rows of another table."""
        rows = wide.transpose(2, 3) @ self._tiled(own)
        for t in range(self.tiles):  # neighbouring tiles share rows
            start = self.corner + t * self.tile
            table[:, start : start + rows.size(2)].add_(rows[:, t])  # += would assign as well

    def _tiled(self, own: Tensor) -> Tensor:
        """Return ``(c, members, D)`` as ``(G, tiles, c / G * N, D)``: a product for all heads."""
        tiles = own.unflatten(1, (self.tiles, self.tile)).unflatten(0, (self.groups, -1))
        return tiles.transpose(1, 2).flatten(2, 3)

    def _pairs(self, wide: Tensor) -> Tensor:
        rows = wide.size(3)
        size = self.tile * rows
        together = self.count // self.groups
        return wide.as_strided(
            (self.count, self.tiles, self.tile, self.others),
            (size if self.groups == 1 else self.tiles * size, together * size, rows + 1, 1),
        )
