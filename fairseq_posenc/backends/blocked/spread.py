"""Multiplies with tables in which runs of distances share a row, and spreads the products to pairs.

One side of a block, its *members*, is multiplied with each distinct row once. The products are then
spread to the pairs, in *patches*. If all pairs of a patch have one row, as beyond the reach of a
clipped table, each member has one product there; elsewhere an index looks up the products. In the
backward pass, the gradients of pairs are first summed by row.

Queries are stored last one first: query i' and key j of a block have the distance i' + j, counted
from the block's lowest one. A *row* is always one of a table.

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
        """Select its members' part of ``(c, members, ...)``, a view."""
        return _narrow(x, 1, self.queries if side == QUERY_SIDE else self.keys)


def _narrow(x: Tensor, dim: int, part: slice) -> Tensor:
    """Select a slice of a dimension; ``narrow`` takes less time than an index by slices."""
    return x.narrow(dim, part.start, part.stop - part.start)


class KeyProducts:
    """The products of all keys of a chunk with all distinct rows, which its blocks share.

    Most blocks see most keys, at other distances; by itself, each would compute many of them again.

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
    def product_grads(self) -> Tensor:
        """The gradients of the products, ``(c, S, U)``: zeros at first, to which blocks add."""
        return self.key.new_zeros(*self.key.shape[:2], self.rows.size(1))

    def add_gradients(self, key_grad: Tensor, table_grad: Tensor | None) -> None:
        """Add to the gradients of keys, ``(c, D, S)``, and of the table, after all blocks."""
        key_grad.add_(self.rows.mT @ self.product_grads.mT)
        # The rows of a reset, at the table's end, have no part in these products.
        rows_grad = None if table_grad is None else table_grad[:, : self.rows.size(1)]
        _add_row_gradients(rows_grad, self.product_grads, self.key)


class Spread:
    """Multiplies one side of a block with distinct rows, and spreads the products to pairs.

    Callers use it like a :class:`~fairseq_posenc.backends.blocked.skew.Band`, by the same methods.

    Args:
        table: ``(G, rows, D)``; the rows of a reset, at its end, are never read.
        row_index: the row of each distance of the call, ``(1, R)``.
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
        lowest = block.distances.start - (src_len - 1)  # j - i of its first query and first key
        highest = block.distances.stop - 1 - (src_len - 1)
        first_row, last_row = bisect_right(starts, lowest), bisect_right(starts, highest)
        self.side = side
        self.keys = block.keys
        self.key_products = key_products
        self.row_range = slice(first_row, last_row + 1)
        self.rows = table[:, self.row_range]  # [G, U, D]
        self.row_index = row_index[0, block.distances] - first_row  # [M + W - 1]
        borders = None  # where the block's second and last row begin
        if first_row < last_row:
            borders = starts[first_row] - lowest, starts[last_row - 1] - lowest
        self.patches = split_patches(borders, last_row - first_row, *block.shape)

    def multiply(self, members: Tensor) -> SpreadProducts:
        """Multiply members ``(c, members, D)`` with the rows."""
        if self.key_products is not None:
            return SpreadProducts(self, self.key_products.products[:, self.keys, self.row_range])
        return SpreadProducts(self, _multiply_rows(members, self.rows))

    def sum_by_row(self, pairs: Tensor) -> Tensor:
        """Sum each member's pairs of equal row in ``(c, M, W)``: ``(c, members, U)``."""
        sums = self.prepare_row_sums(like=pairs)
        for patch in self.patches:
            self.add_by_row(sums, patch, patch.select(pairs))
        return sums

    def prepare_row_sums(self, like: Tensor) -> Tensor:
        """Make the zeros that :meth:`sum_by_row` adds to, or select the sums that blocks share."""
        if self.key_products is not None:
            return self.key_products.product_grads[:, self.keys, self.row_range]
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
        """Add up rows by the weights of :meth:`sum_by_row` for each member, ``(c, members, D)``."""
        return sums @ (self.rows[0] if len(self.rows) == 1 else self.rows)

    def add_gradients(
        self, sums: Tensor, members: Tensor, member_grad: Tensor, table_grad: Tensor | None
    ) -> None:
        """Add to the gradients of members and table; those that blocks share are added later.

        Args:
            sums: of the pairs' gradients by row (:meth:`sum_by_row`).
            members: ``(c, members, D)``.
            member_grad: of queries ``(c, members, D)``, or of keys ``(c, D, members)``.
            table_grad: None if the table needs none.
        """
        if self.key_products is not None:
            return
        by_query = self.side == QUERY_SIDE
        member_grad.add_(self.sum_weighted_rows(sums) if by_query else self.rows.mT @ sums.mT)
        self.add_table_gradient(table_grad, sums, members)

    def add_table_gradient(self, table_grad: Tensor | None, sums: Tensor, members: Tensor) -> None:
        """Add up members ``(c, members, D)``, times ``sums``, in the table's gradient, if any."""
        rows_grad = None if table_grad is None else table_grad[:, self.row_range]
        _add_row_gradients(rows_grad, sums, members)

    def index(self, patch: Patch, batch: int) -> Tensor:
        """View the row index of each pair of a patch, ``(c, members, others)``."""
        queries = patch.queries.stop - patch.queries.start
        keys = patch.keys.stop - patch.keys.start
        shape = (queries, keys) if self.side == QUERY_SIDE else (keys, queries)
        # The distance i' + j is the index of pair (i', j), so both strides are 1.
        start = self.row_index.storage_offset() + patch.queries.start + patch.keys.start
        return self.row_index.as_strided((batch, *shape), (0, 1, 1), start)


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
    """Split a block; for every 256 queries: near keys, and on either side farther ones of one row.

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
        single_row_pairs += (end - begin) * (keys - high + low)
        parts = [(slice(0, low), 0), (slice(low, high), None), (slice(high, keys), last_row)]
        patches += [
            Patch(slice(begin, end), part, row) for part, row in parts if part.start < part.stop
        ]
    is_worth_it = single_row_pairs >= MIN_SINGLE_ROW * queries * keys
    return tuple(patches) if is_worth_it else (whole_block,)


def add_pairs(pairs: Tensor, term: Tensor | SpreadProducts) -> None:
    """Add a number of each pair to ``(c, M, W)``; those of a Band may be ``(c, tiles, N, W)``."""
    if isinstance(term, SpreadProducts):
        term.add_to(pairs)
    else:
        (pairs.view(term.shape) if term.dim() == 4 else pairs).add_(term)


def _multiply_rows(members: Tensor, rows: Tensor) -> Tensor:
    """Multiply ``(c, members, D)`` with ``(G, U, D)``: ``(c, members, U)``."""
    return members @ (rows[0] if len(rows) == 1 else rows).mT


def _add_row_gradients(rows_grad: Tensor | None, sums: Tensor, members: Tensor) -> None:
    """Add up members ``(c, members, D)``, times ``sums``, in the gradients of rows, if any."""
    if rows_grad is None:
        return
    if len(rows_grad) == 1:  # all heads share the table: one product for them
        sums = sums.flatten(0, 1)[None]
        members = members.flatten(0, 1)[None]
    rows_grad.baddbmm_(sums.mT, members)
