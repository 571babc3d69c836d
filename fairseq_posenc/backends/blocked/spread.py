"""Multiplies with tables in which runs of distances share a row, and spreads the products to pairs.

One side of a block, its *members*, is multiplied with each distinct row once. The products are then
spread to the pairs, in *patches*. If all pairs of a patch have one row, as beyond the reach of a
clipped table, each member has one product there; elsewhere an index looks up the products. In the
backward pass, the gradients of pairs are first summed by row.

Queries are stored last one first: query i' and key j of a block have the distance i' + j, counted
from the block's lowest one. A *row* is always one of a table. Rows of a *reset*, for pairs with the
first token, may be at a table's end; they are not used here.

Shapes: D head size; G tables (1, or c, one for each head of a single sentence), R distances, U rows
that a block needs; c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.skew import KEY_SIDE, QUERY_SIDE, Band, transpose_pairs

PATCH_QUERIES = 256  # queries of a patch
# A block is cut into patches if at least this share of its pairs is in patches of one row.
MIN_SINGLE_ROW = 0.25


class Patch(NamedTuple):
    """A rectangle of a block's pairs."""

    queries: slice  # counted from the first of the block
    keys: slice
    row: int | None  # the row of all its pairs, among the block's U; None if they have several

    def select(self, pairs: Tensor) -> Tensor:
        """Select its part of ``(c, M, W)``, a view."""
        return _narrow(_narrow(pairs, 1, self.queries), 2, self.keys)

    def select_members(self, x: Tensor, side: int) -> Tensor:
        """Select its members' part of ``(c, members, ...)``, a view."""
        return _narrow(x, 1, self.queries if side == QUERY_SIDE else self.keys)


def _narrow(x: Tensor, dim: int, part: slice) -> Tensor:
    """Select a slice of a dimension; ``narrow`` takes less time than an index by slices."""
    return x.narrow(dim, part.start, part.stop - part.start)


class KeyProducts:
    """The products of all keys of a chunk with all distinct rows, which its blocks share.

    Most blocks see most keys; without sharing, each would multiply them again with the same rows.
    """

    def __init__(self, key: Tensor, rows: Tensor) -> None:
        self.key = key  # [c, S, D]
        self.rows = rows  # [G, U, D]

    @cached_property
    def products(self) -> Tensor:
        """The products, ``(c, S, U)``."""
        return self.key @ _as_factor(self.rows).mT

    @cached_property
    def product_grads(self) -> Tensor:
        """The gradients of the products, ``(c, S, U)``: zeros at first, to which blocks add."""
        return self.key.new_zeros(*self.key.shape[:2], self.rows.size(1))

    def add_gradients(self, key_grad: Tensor, table_grad: Tensor | None) -> None:
        """Add to the gradients of keys, ``(c, D, S)``, and of the table, after all blocks."""
        key_grad.add_(self.rows.mT @ self.product_grads.mT)
        _add_row_gradients(table_grad, slice(self.rows.size(1)), self.product_grads, self.key)


class RowTable(NamedTuple):
    """A table in which runs of distances j - i share a row."""

    rows: Tensor  # `(G, rows, D)`
    row_index: Tensor  # the row of each distance of the call, `(1, R)`
    starts: Sequence[int]  # row n serves the distances from `starts[n - 1]` on (see `Runs`)
    lowest: int  # the lowest distance of the call, -(S - 1)


class Spread:
    """Multiplies one side of a block with distinct rows, and spreads the products to pairs.

    It has the methods of a :class:`~fairseq_posenc.backends.blocked.skew.Band` (``multiply``,
    ``arrange_by_row``, ``sum_weighted_rows``, ``add_gradients``, ``add_table_gradient``).

    Args:
        table: the rows, and their distances.
        block: queries and keys of a chunk.
        side: which of them are the members, QUERY_SIDE or KEY_SIDE.
    """

    def __init__(self, table: RowTable, block: Block, side: int) -> None:
        # `block.distance_range` counts from the lowest distance of the call.
        lowest = block.distance_range.start + table.lowest
        highest = block.distance_range.stop - 1 + table.lowest
        starts = table.starts
        first_row, last_row = bisect_right(starts, lowest), bisect_right(starts, highest)
        self.side = side
        self.row_range = slice(first_row, last_row + 1)
        self.rows = table.rows[:, self.row_range]  # [G, U, D]
        self.row_index = table.row_index[0, block.distance_range] - first_row  # [M + W - 1]
        borders = None  # where the block's second and last row begin
        if first_row < last_row:
            borders = starts[first_row] - lowest, starts[last_row - 1] - lowest
        self.patches = split_patches(borders, last_row - first_row, *block.shape)

    def multiply(self, members: Tensor) -> SpreadProducts:
        """Multiply members ``(c, members, D)`` with the rows."""
        return SpreadProducts(self, members @ _as_factor(self.rows).mT)

    def arrange_by_row(self, pairs: Tensor) -> Tensor:
        """Sum each member's pairs of equal row in ``(c, M, W)``: ``(c, members, U)``."""
        sums = self.prepare_row_sums(like=pairs)
        for patch in self.patches:
            self.add_by_row(sums, patch, patch.select(pairs))
        return sums

    def prepare_row_sums(self, like: Tensor) -> Tensor:
        """Make the zeros that :meth:`arrange_by_row` adds to."""
        members = like.size(1 if self.side == QUERY_SIDE else 2)
        return like.new_zeros(len(like), members, self.rows.size(1))

    def add_by_row(self, sums: Tensor, patch: Patch, pairs: Tensor) -> None:
        """Add the pairs of a patch to the sums ``(c, members, U)`` of their members and rows."""
        sums = patch.select_members(sums, self.side)
        if patch.row is not None:
            others = 2 if self.side == QUERY_SIDE else 1
            sums.select(2, patch.row).add_(pairs.sum(others))
        else:
            pairs = pairs if self.side == QUERY_SIDE else transpose_pairs(pairs)
            sums.scatter_add_(2, self.index(patch, len(pairs)), pairs)

    def sum_weighted_rows(self, sums: Tensor) -> Tensor:
        """Add up rows by the arranged weights of each member, ``(c, members, D)``."""
        return sums @ _as_factor(self.rows)

    def add_gradients(
        self, sums: Tensor, members: Tensor, member_grad: Tensor, table_grad: Tensor | None
    ) -> None:
        """Add to the gradients of members and table, given ``sums`` of the pairs' gradients by row.

        The shapes are those of :meth:`~fairseq_posenc.backends.blocked.skew.Band.add_gradients`.
        """
        by_query = self.side == QUERY_SIDE
        member_grad.add_(self.sum_weighted_rows(sums) if by_query else self.rows.mT @ sums.mT)
        self.add_table_gradient(table_grad, sums, members)

    def add_table_gradient(self, table_grad: Tensor | None, sums: Tensor, members: Tensor) -> None:
        """Add up members ``(c, members, D)``, times ``sums``, in the table's gradient, if any."""
        _add_row_gradients(table_grad, self.row_range, sums, members)

    def index(self, patch: Patch, batch: int) -> Tensor:
        """View the row index of each pair of a patch, ``(c, members, others)``."""
        queries = patch.queries.stop - patch.queries.start
        keys = patch.keys.stop - patch.keys.start
        shape = (queries, keys) if self.side == QUERY_SIDE else (keys, queries)
        # Pair (i', j) is at its distance i' + j: strides 1 and 1.
        start = patch.queries.start + patch.keys.start
        return self.row_index.as_strided((batch, *shape), (0, 1, 1), start)


class SharedSpread(Spread):
    """A Spread of keys, whose products all blocks share.

    They share the sums by row, too: each block adds its pairs to them.
    """

    def __init__(self, table: RowTable, block: Block, key_products: KeyProducts) -> None:
        super().__init__(table, block, KEY_SIDE)
        self.keys = block.keys
        self.key_products = key_products

    def multiply(self, members: Tensor) -> SpreadProducts:
        """Select the products of the block's keys with its rows."""
        return SpreadProducts(self, self.key_products.products[:, self.keys, self.row_range])

    def prepare_row_sums(self, like: Tensor) -> Tensor:
        """Select the shared sums of the block's keys and rows, a view."""
        return self.key_products.product_grads[:, self.keys, self.row_range]

    def add_gradients(
        self, sums: Tensor, members: Tensor, member_grad: Tensor, table_grad: Tensor | None
    ) -> None:
        """Add nothing: :meth:`KeyProducts.add_gradients` does, after the last block."""


# Multiplies one side of a block with the rows of a table.
BlockRows = Band | Spread


class SpreadProducts(NamedTuple):
    """The products of members and rows, not yet spread to a number for each pair."""

    spread: Spread
    by_row: Tensor  # `(c, members, U)`

    def add_to(self, pairs: Tensor) -> None:
        """Add each pair's number to ``(c, M, W)``."""
        for patch in self.spread.patches:
            patch.select(pairs).add_(self.select(patch))

    def select(self, patch: Patch) -> Tensor:
        """Look up the numbers of a patch's pairs, in a shape that broadcasts to them."""
        side = self.spread.side
        products = patch.select_members(self.by_row, side)
        if patch.row is not None:
            pairs = products.narrow(2, patch.row, 1)
            return pairs if side == QUERY_SIDE else pairs.mT
        pairs = products.gather(2, self.spread.index(patch, len(products)))
        return pairs if side == QUERY_SIDE else transpose_pairs(pairs)


@lru_cache(maxsize=256)
def split_patches(
    borders: tuple[int, int] | None, last_row: int, queries: int, keys: int
) -> tuple[Patch, ...]:
    """Split a block into patches of some queries and near keys, or farther keys of one row.

    Blocks of all chunks and layers have equal patches, so these are kept.

    Args:
        borders: the distances, counted from the block's lowest one, where the second and the last
            row begin; None if the block needs a single row.
        last_row: the index of the last row.
        queries: M.
        keys: W.
    """
    whole_block = Patch(slice(0, queries), slice(0, keys), None)
    if borders is None:
        return (whole_block._replace(row=0),)
    patches = []
    single_row_pairs = 0
    for begin in range(0, queries, PATCH_QUERIES):
        end = min(begin + PATCH_QUERIES, queries)
        # Keys before `low` have the first row even for query i' = end - 1, keys from `high` on have
        # the last row even for query i' = begin.
        low = min(max(borders[0] - end + 1, 0), keys)
        high = min(max(borders[1] - begin, low), keys)
        single_row_keys = low + keys - high
        single_row_pairs += (end - begin) * single_row_keys
        parts = [(slice(0, low), 0), (slice(low, high), None), (slice(high, keys), last_row)]
        patches += [
            Patch(slice(begin, end), part, row) for part, row in parts if part.start < part.stop
        ]
    is_worth_it = single_row_pairs >= MIN_SINGLE_ROW * queries * keys
    return tuple(patches) if is_worth_it else (whole_block,)


def add_pairs(pairs: Tensor, term: Tensor | SpreadProducts) -> None:
    """Add a number of each pair to ``(c, M, W)``."""
    if isinstance(term, SpreadProducts):
        term.add_to(pairs)
    elif term.dim() == 4:  # of a Band: tiles of queries, (c, tiles, queries, W)
        pairs.view(term.shape).add_(term)
    else:
        pairs.add_(term)


def _as_factor(rows: Tensor) -> Tensor:
    """Drop the dimension of a single table, so that torch makes one product for all heads."""
    return rows[0] if len(rows) == 1 else rows


def _add_row_gradients(grad: Tensor | None, rows: slice, sums: Tensor, members: Tensor) -> None:
    """Add up members ``(c, members, D)``, times ``sums``, in rows of a table's gradient, if any."""
    if grad is None:
        return
    if len(grad) == 1:  # all heads share the table: one product for them
        sums = sums.flatten(0, 1)[None]
        members = members.flatten(0, 1)[None]
    grad[:, rows].baddbmm_(sums.mT, members)
