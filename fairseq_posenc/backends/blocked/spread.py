"""Multiplies with tables in which runs of distances share a row, and spreads the products to pairs.

One side of a block, its *members*, is multiplied with each distinct row once. The products are then
spread to the pairs, in *patches*. If all pairs of a patch have one row, as beyond the reach of a
clipped table, each member has one product there; elsewhere an index looks up the products. In the
backward pass, the gradients of pairs are first summed by row.

Shapes: D head size; G tables (1 for all heads, or one each), R distances, U distinct rows that a
block needs; c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE, transpose_pairs

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
        """Select its members' part of ``(c, members, U)``, a view."""
        return _narrow(x, 1, self.queries if side == QUERY_SIDE else self.keys)


def _narrow(x: Tensor, dim: int, part: slice) -> Tensor:
    """Select a slice of a dimension; ``narrow`` takes less time than an index by slices."""
    return x.narrow(dim, part.start, part.stop - part.start)


class KeyProducts:
    """The products of all keys of a chunk with all distinct rows, which its blocks share.

    Most blocks see most keys, each at other distances. If each computed its products by itself,
    many would be computed again.

    Args:
        key: ``(c, S, D)``.
        rows: ``(G, U, D)``.
    """

    def __init__(self, key: Tensor, rows: Tensor) -> None:
        self.key = key
        self.rows = rows

    @cached_property
    def products(self) -> Tensor:
        """The products, ``(c, S, U)``."""
        return _multiply_rows(self.key, self.rows)

    @cached_property
    def sums(self) -> Tensor:
        """The gradients of the products, ``(c, S, U)``: zeros that blocks add to."""
        return self.key.new_zeros(*self.key.shape[:2], self.rows.size(1))

    def add_gradients(self, key_grad: Tensor, table_grad: Tensor | None) -> None:
        """Add to the gradients of keys, ``(c, D, S)``, and of the table, after all blocks."""
        key_grad.add_(_sum_rows_transposed(self.sums, self.rows))
        _add_row_gradients(table_grad, self.sums, self.key)


class Spread:
    """Multiplies one side of a block with distinct rows, and spreads the products to pairs.

    Args:
        table: ``(G, rows, D)``; the rows of a reset, at its end, are never read.
        row_index: the row of each distance, ``(1, R)``.
        starts: see :class:`~fairseq_posenc.encodings.runs.Runs`.
        block: queries and keys of a chunk.
        side: which of them are the members, QUERY_SIDE or KEY_SIDE.
        src_len: S.
        key_products: the products that blocks share, if keys are the members; None: no sharing.
    """

    def __init__(
        self,
        table: Tensor,
        row_index: Tensor,
        starts: Sequence[int],
        block: Block,
        side: int,
        src_len: int,
        key_products: KeyProducts | None = None,
    ) -> None:
        lowest = block.rows.start - (src_len - 1)  # distances of the block
        highest = lowest + sum(block.shape) - 2
        first, last = bisect_right(starts, lowest), bisect_right(starts, highest)  # their rows
        self.side = side
        self.keys = block.keys
        self.key_products = key_products
        self.row_range = slice(first, last + 1)
        self.rows = table[:, self.row_range]  # [G, U, D]
        self.row_index = row_index[0, block.rows] - first  # [M + W - 1]
        later_starts = starts[first:last]  # first distances of the block's rows but the first
        borders = (later_starts[0] - lowest, later_starts[-1] - lowest) if later_starts else None
        self.patches = split_patches(borders, len(later_starts), *block.shape)

    def multiply(self, members: Tensor) -> SpreadProducts:
        """Multiply members ``(c, members, D)`` with the rows."""
        if self.key_products is not None:
            return SpreadProducts(self, self.key_products.products[:, self.keys, self.row_range])
        return SpreadProducts(self, _multiply_rows(members, self.rows))

    def sum_by_row(self, pairs: Tensor) -> Tensor:
        """Sum each member's pairs of equal row in ``(c, M, W)``: ``(c, members, U)``."""
        sums = self.begin_sums(pairs)
        for patch in self.patches:
            self.add_by_row(sums, patch, patch.select(pairs))
        return sums

    def begin_sums(self, pairs: Tensor) -> Tensor:
        """Make zeros for :meth:`sum_by_row`, or select the sums that blocks share."""
        if self.key_products is not None:
            return self.key_products.sums[:, self.keys, self.row_range]
        return pairs.new_zeros(len(pairs), pairs.size(self.side + 1), self.rows.size(1))

    def add_by_row(self, sums: Tensor, patch: Patch, pairs: Tensor) -> None:
        """Add the pairs of a patch to the sums ``(c, members, U)`` of their members and rows."""
        sums = patch.select_members(sums, self.side)
        if patch.row is not None:
            sums.select(2, patch.row).add_(pairs.sum(2 - self.side))
        else:
            pairs = pairs if self.side == QUERY_SIDE else transpose_pairs(pairs)
            sums.scatter_add_(2, self.index(patch, len(pairs)), pairs)

    def sum_rows(self, sums: Tensor) -> Tensor:
        """Add up the rows by weight (:meth:`sum_by_row`) for each member, ``(c, members, D)``."""
        return sums @ (self.rows[0] if len(self.rows) == 1 else self.rows)

    def add_gradients(
        self, sums: Tensor, members: Tensor, member_grad: Tensor, table_grad: Tensor | None
    ) -> None:
        """Add to the gradients of members and table, unless blocks share them.

        Args:
            sums: of the pairs' gradients by row (:meth:`sum_by_row`).
            members: ``(c, members, D)``.
            member_grad: of queries ``(c, members, D)``, or of keys ``(c, D, members)``.
            table_grad: None if the table needs none.
        """
        if self.key_products is not None:
            return
        by_query = self.side == QUERY_SIDE
        member_grad.add_(self.sum_rows(sums) if by_query else _sum_rows_transposed(sums, self.rows))
        self.add_table_gradient(table_grad, sums, members)

    def add_table_gradient(self, table_grad: Tensor | None, sums: Tensor, members: Tensor) -> None:
        """Add the sums of members ``(c, members, D)`` by weight to the table's gradient, if any."""
        rows_grad = None if table_grad is None else table_grad[:, self.row_range]
        _add_row_gradients(rows_grad, sums, members)

    def index(self, patch: Patch, batch: int) -> Tensor:
        """View the row index of each pair of a patch, ``(c, members, others)``."""
        queries = patch.queries.stop - patch.queries.start
        keys = patch.keys.stop - patch.keys.start
        shape = (queries, keys) if self.side == QUERY_SIDE else (keys, queries)
        # Pair (i', j) has the distance number i' + j of the block, so both strides are 1.
        start = self.row_index.storage_offset() + patch.queries.start + patch.keys.start
        return self.row_index.as_strided((batch, *shape), (0, 1, 1), start)


class SpreadProducts(NamedTuple):
    """The products of members and rows, not yet spread to a number for each pair."""

    spread: Spread
    products: Tensor  # `(c, members, U)`

    def add_to(self, pairs: Tensor) -> None:
        """Add each pair's number to ``(c, M, W)``."""
        for patch in self.spread.patches:
            patch.select(pairs).add_(self.select(patch))

    def select(self, patch: Patch) -> Tensor:
        """Look up the numbers of a patch's pairs, in a shape that broadcasts to them."""
        side = self.spread.side
        products = patch.select_members(self.products, side)
        if patch.row is not None:
            pairs = products.narrow(2, patch.row, 1)
            return pairs if side == QUERY_SIDE else pairs.mT
        pairs = products.gather(2, self.spread.index(patch, len(products)))
        return pairs if side == QUERY_SIDE else transpose_pairs(pairs)


@lru_cache(maxsize=256)
def split_patches(
    borders: tuple[int, int] | None, last_row: int, queries: int, keys: int
) -> tuple[Patch, ...]:
    """Split a block into patches: for some queries, near keys, and farther ones of a single row.

    Args:
        borders: where the second and the last row begin, counted from the distance of the first
            query and the first key; None if the block needs a single row.
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
        # Keys before `low` have the first row for all these queries, those from `high` on the last.
        low = min(max(borders[0] - end + 1, 0), keys)
        high = min(max(borders[1] - begin, low), keys)
        single_row_pairs += (end - begin) * (keys - high + low)
        parts = [(slice(0, low), 0), (slice(low, high), None), (slice(high, keys), last_row)]
        patches += [
            Patch(slice(begin, end), part, row) for part, row in parts if part.start < part.stop
        ]
    is_worth_it = single_row_pairs >= MIN_SINGLE_ROW * queries * keys
    return tuple(patches) if is_worth_it else (whole_block,)


def add_pairs(pairs: Tensor, term: Tensor | SpreadProducts) -> None:
    """Add a number of each pair to ``(c, M, W)``; a band's may be ``(c, tiles, N, W)``."""
    if isinstance(term, SpreadProducts):
        term.add_to(pairs)
    else:
        (pairs.view(term.shape) if term.dim() == 4 else pairs).add_(term)


def _multiply_rows(members: Tensor, rows: Tensor) -> Tensor:
    """Multiply ``(c, members, D)`` with ``(G, U, D)``: ``(c, members, U)``."""
    return members @ (rows[0] if len(rows) == 1 else rows).mT


def _sum_rows_transposed(sums: Tensor, rows: Tensor) -> Tensor:
    """Add up rows ``(G, U, D)`` by weight ``(c, members, U)``: ``(c, D, members)``."""
    return rows.mT @ sums.mT


def _add_row_gradients(rows_grad: Tensor | None, sums: Tensor, members: Tensor) -> None:
    """Add the sums of members ``(c, members, D)`` by weight to the gradients of rows, if any."""
    if rows_grad is None:
        return
    if len(rows_grad) == 1:  # all heads share the table: one product for them
        sums = sums.flatten(0, 1)[None]
        members = members.flatten(0, 1)[None]
    rows_grad[:, : sums.size(2)].baddbmm_(sums.mT, members)
