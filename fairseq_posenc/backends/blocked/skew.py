"""The relative shift: finds the table rows of a block's pairs by views, without an index.

Queries are stored last one first: then query i' and key j have the distance of table row i' + j,
and a block of M queries and W keys needs a run of M + W - 1 rows (``block.distance_range``). The
product of one side with that run is *skewed*: each member's scores begin one column later than
those of the member before. A view whose row stride is longer by one undoes that without a copy,
forward and backward. For M = 2, W = 2, products ``ab. | .cd`` are the pairs ``ab | cd``: stride 4
in place of 3. Pictures are in ``docs/blocked.md``.

The letters of shapes are those of :mod:`~fairseq_posenc.backends.blocked.geometry`.
"""

import math

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block

# The sides of a block, as dimensions of `Block.shape`; 1 - side is the other one.
QUERY_SIDE = 0
KEY_SIDE = 1
SUM_TILE = 64  # queries whose pairs are summed together


def view_by_distance(numbers: Tensor, block: Block) -> Tensor:
    """View numbers by distance, ``(G, R)``, as those of a block's pairs, ``(G, M, W)``."""
    start = numbers.storage_offset() + block.distance_range.start
    return numbers.as_strided((numbers.size(0), *block.shape), (numbers.size(1), 1, 1), start)


def sum_by_distance(x: Tensor) -> Tensor:
    """Sum the pairs of equal distance in ``(G, M, W)``: ``(G, M + W - 1)``.

    Sums within tiles of queries come first: the whole, skewed at once, would be mostly zeros.
    """
    tile = math.gcd(x.size(1), SUM_TILE)
    within = _sum_skewed(x.unflatten(1, (-1, tile)), 1)  # [G, tiles, tile + W - 1]
    return _sum_skewed(within, tile)


def _sum_skewed(x: Tensor, step: int) -> Tensor:
    """Sum the rows of ``(..., N, W)``, each moved by ``step`` from the one before."""
    *outer, rows, width = x.shape
    skewed = x.new_zeros(*outer, rows, (rows - 1) * step + width)
    *strides, to_next, _ = skewed.stride()
    skewed.as_strided(x.shape, (*strides, to_next + step, 1)).copy_(x)
    return skewed.sum(-2)  # [..., (N - 1) * step + W]


def transpose_pairs(pairs: Tensor) -> Tensor:
    """Copy pairs by key, ``(c, W, M)`` or ``(c, tiles, N, M)``, to ``(c, M, W)``.

    All heads are laid side by side as one matrix, which torch transposes several times faster than
    it reads a transposed view of several.
    """
    stacked = pairs.movedim(0, -2).reshape(-1, len(pairs) * pairs.size(-1))  # [W, c * M]
    return stacked.t().contiguous().unflatten(0, (len(pairs), -1))  # [c, M, W]


class Band:
    """Multiplies one side of a block, its *members*, with the table rows of their pairs.

    A band is the run of table rows that a tile of N members needs. A single member needs only as
    many rows as the other side has members, so small tiles compute few needless products.

    Args:
        table: ``(G, R, D)``, contiguous.
        block: queries and keys of a chunk; the members are a multiple of N.
        side: which of them are the members, QUERY_SIDE or KEY_SIDE.
        tile: N.
    """

    def __init__(self, table: Tensor, block: Block, side: int, tile: int) -> None:
        self.start = block.distance_range.start
        self.side = side
        self.tile = tile
        self.groups, _, width = table.shape
        self.tiles = block.shape[side] // tile
        self.others = block.shape[1 - side]
        self.rows = table.as_strided(  # [G, tiles, N + others - 1, D]
            (self.groups, self.tiles, tile + self.others - 1, width),
            (table.stride(0), tile * width, width, 1),
            table.storage_offset() + self.start * width,
        )

    def multiply(self, members: Tensor) -> Tensor:
        """Multiply members ``(c, members, D)`` with the rows of all pairs.

        Returns:
            ``(c, tiles, N, W)``, a view, where queries are the members, else ``(c, M, W)``.
        """
        products = self._tile(members) @ self.rows.transpose(2, 3)
        pairs = self._unskew(products)  # [c, tiles, N, others]
        return pairs if self.side == QUERY_SIDE else transpose_pairs(pairs)

    def arrange_by_row(self, weights: Tensor) -> Tensor:
        """Skew the weights of pairs, ``(c, M, W)``, to those of rows, with zeros elsewhere.

        No two pairs of a member have the same row (unlike in a Spread, which sums them).

        Returns:
            ``(G, tiles, c / G * N, N + others - 1)``.
        """
        if self.side == KEY_SIDE:
            weights = transpose_pairs(weights)  # [c, W, M]
        pairs = weights.unflatten(1, (-1, self.tile))  # [c, tiles, N, others]
        stacked = weights.size(0) // self.groups * self.tile  # members that share a table
        skewed = weights.new_zeros(self.groups, self.tiles, stacked, self.rows.size(2))
        self._unskew(skewed).copy_(pairs)
        return skewed

    def sum_weighted_rows(self, skewed: Tensor) -> Tensor:
        """Add up rows by the arranged weights of each member, ``(c, members, D)``."""
        sums = (skewed @ self.rows).unflatten(2, (-1, self.tile))  # [G, tiles, c / G, N, D]
        return sums.transpose(1, 2).reshape(-1, self.tiles * self.tile, sums.size(-1))

    def add_gradients(
        self, skewed: Tensor, members: Tensor, member_grad: Tensor, table_grad: Tensor | None
    ) -> None:
        """Add to the gradients of members and table.

        Args:
            skewed: the pairs' gradients (:meth:`arrange_by_row`).
            members: ``(c, members, D)``.
            member_grad: of queries ``(c, members, D)``, or of keys ``(c, D, members)``.
            table_grad: None if the table needs none.
        """
        by_query = self.side == QUERY_SIDE
        sums = self.sum_weighted_rows(skewed) if by_query else self._sum_transposed(skewed)
        member_grad.add_(sums)
        self.add_table_gradient(table_grad, skewed, members)

    def add_table_gradient(
        self, table_grad: Tensor | None, skewed: Tensor, members: Tensor
    ) -> None:
        """Add up members ``(c, members, D)`` by weight in the table's gradient, if any."""
        if table_grad is None:
            return
        rows_grad = skewed.transpose(2, 3) @ self._tile(members)  # [G, tiles, N + others - 1, D]
        for index in range(self.tiles):  # one by one, since neighbouring tiles share rows
            start = self.start + index * self.tile
            table_grad[:, start : start + rows_grad.size(2)].add_(rows_grad[:, index])

    def _sum_transposed(self, skewed: Tensor) -> Tensor:
        """Compute :meth:`sum_weighted_rows` as ``(c, D, members)``, like gradients of keys."""
        sums = (self.rows.transpose(2, 3) @ skewed.transpose(2, 3)).unflatten(3, (-1, self.tile))
        return sums.permute(0, 3, 2, 1, 4).reshape(-1, sums.size(2), self.tiles * self.tile)

    def _tile(self, members: Tensor) -> Tensor:
        """Reshape ``(c, members, D)`` to ``(G, tiles, c / G * N, D)``: a product for all heads."""
        tiles = members.unflatten(1, (self.tiles, self.tile))  # [c, tiles, N, D]
        tiles = tiles.unflatten(0, (self.groups, -1))  # [G, c / G, tiles, N, D]
        return tiles.transpose(1, 2).flatten(2, 3)  # [G, tiles, c / G * N, D]

    def _unskew(self, skewed: Tensor) -> Tensor:
        """View the pairs ``(c, tiles, N, others)`` in products with all rows of a band."""
        stacked, rows = skewed.shape[2:]
        size = self.tile * rows  # numbers of a tile of one head
        # With a table for each head, a chunk has one sentence, and its heads are the groups: c = G.
        return skewed.as_strided(
            (self.groups * stacked // self.tile, self.tiles, self.tile, self.others),
            (size if self.groups == 1 else self.tiles * size, stacked * rows, rows + 1, 1),
        )
