"""Multiplies with tables whose rows serve runs of distances, and spreads the products along them.

One side of a block, its *members*, is multiplied with each distinct row once. The products are then
spread to the pairs, in *patches*. If all pairs of a patch have one row, as beyond the reach of a
clipped table, each member has one product there; elsewhere an index looks up the products. In the
backward pass, the gradients of pairs are first summed by row.

Shapes: B batch, H heads, D head size; G tables (1 for all heads, or one each), U distinct rows that
a block needs; c pairs of sentence and head in a chunk, M queries and W keys of a block.
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
MIN_FAR = 0.25  # share of pairs in patches of one row from which on a block is cut into patches


class Patch(NamedTuple):
    """A rectangle of a block's pairs."""

    queries: slice
    keys: slice
    row: int | None  # of all its pairs, among those of the block; None if they have several

    def select(self, pairs: Tensor) -> Tensor:
        """Select its part of ``(c, M, W)``, a view."""
        return _narrow(_narrow(pairs, 1, self.queries), 2, self.keys)

    def select_members(self, x: Tensor, side: int) -> Tensor:
        """Select its members' part of ``(c, members, U)``, a view."""
        return _narrow(x, 1, self.queries if side == QUERY_SIDE else self.keys)


def _narrow(x: Tensor, dim: int, part: slice) -> Tensor:
    """Select a slice of a dimension: a block has many, and an index by slices takes longer."""
    return x.narrow(dim, part.start, part.stop - part.start)


class KeyProducts:
    """The products of all keys of a chunk with all distinct rows, which its blocks share.

    Most blocks see most keys, at other distances: each block by itself would compute many of these
    products again.

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

    def add_gradients(self, total: Tensor, table: Tensor | None) -> None:
        """Add the gradients of keys, ``(c, D, S)``, and of the table, after all blocks."""
        total.add_(_sum_rows_transposed(self.sums, self.rows))
        _add_row_gradients(table, self.sums, self.key)


class Spread:
    """Multiplies one side of a block with distinct rows, and spreads the products to pairs.

    Args:
        table: ``(G, rows, D)``; the rows of a reset, at its end, are never read.
        places: the row of each distance, ``(1, R)``.
        starts: see :class:`~fairseq_posenc.encodings.runs.Runs`.
        block: queries and keys of a chunk.
        side: which of them are the members, QUERY_SIDE or KEY_SIDE.
        src_len: S.
        common: products that blocks share, where keys are the members.
    """

    def __init__(
        self,
        table: Tensor,
        places: Tensor,
        starts: Sequence[int],
        block: Block,
        side: int,
        src_len: int,
        common: KeyProducts | None = None,
    ) -> None:
        lowest = block.rows.start - (src_len - 1)
        ends = lowest, lowest + sum(block.shape) - 2
        first, last = (bisect_right(starts, end) for end in ends)
        self.side = side
        self.keys = block.keys
        self.common = common
        self.kept = slice(first, last + 1)
        self.rows = table[:, self.kept]  # [G, U, D]
        self.places = places[0, block.rows] - first  # [M + W - 1]
        later_starts = starts[first:last]  # first distances of the block's rows but the first
        borders = (later_starts[0] - lowest, later_starts[-1] - lowest) if later_starts else None
        self.patches = split_patches(borders, len(later_starts), *block.shape)

    def multiply(self, members: Tensor) -> SpreadProducts:
        """Multiply members ``(c, members, D)`` with the rows."""
        if self.common is not None:
            return SpreadProducts(self, self.common.products[:, self.keys, self.kept])
        return SpreadProducts(self, _multiply_rows(members, self.rows))

    def sum_by_row(self, pairs: Tensor) -> Tensor:
        """Sum each member's pairs of equal row in ``(c, M, W)``: ``(c, members, U)``."""
        sums = self.begin_sums(pairs)
        for patch in self.patches:
            self.add_by_row(sums, patch, patch.select(pairs))
        return sums

    def begin_sums(self, pairs: Tensor) -> Tensor:
        """Make zeros for the sums of pairs ``(c, M, W)``; or select those that blocks share."""
        if self.common is not None:
            return self.common.sums[:, self.keys, self.kept]
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
        self, sums: Tensor, members: Tensor, total: Tensor, table: Tensor | None
    ) -> None:
        """Add the gradients of members and table, unless blocks share them.

        Args:
            sums: of the pairs' gradients by row (:meth:`sum_by_row`).
            members: ``(c, members, D)``.
            total: gradient of queries ``(c, members, D)``, or of keys ``(c, D, members)``.
            table: gradient of the table; None if it needs none.
        """
        if self.common is not None:
            return
        by_query = self.side == QUERY_SIDE
        total.add_(self.sum_rows(sums) if by_query else _sum_rows_transposed(sums, self.rows))
        self.add_table_gradient(table, sums, members)

    def add_table_gradient(self, table: Tensor | None, sums: Tensor, members: Tensor) -> None:
        """Add the weighted sums of members ``(c, members, D)`` to a table of gradients, if any."""
        _add_row_gradients(None if table is None else table[:, self.kept], sums, members)

    def index(self, patch: Patch, batch: int) -> Tensor:
        """Index the row of each pair of a patch, ``(c, members, others)``: a view."""
        sizes = [x.stop - x.start for x in (patch.queries, patch.keys)]
        shape = sizes if self.side == QUERY_SIDE else sizes[::-1]
        start = self.places.storage_offset() + patch.queries.start + patch.keys.start
        return self.places.as_strided((batch, *shape), (0, 1, 1), start)


class SpreadProducts(NamedTuple):
    """The products of members and rows, which stand for a number of each pair."""

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
    """Split a block into patches: those of one row to either side of those of several.

    Args:
        borders: where the second and the last row begin, counted from the distance of the first
            query and the first key; None if there is but one row.
        last_row: the index of the last row.
        queries: M.
        keys: W.
    """
    everything = slice(0, queries), slice(0, keys)
    if borders is None:
        return (Patch(*everything, 0),)
    patches = []
    far = 0
    for begin in range(0, queries, PATCH_QUERIES):
        end = min(begin + PATCH_QUERIES, queries)
        # Keys before `low` have the first row for all these queries, those from `high` on the last.
        low = min(max(borders[0] - end + 1, 0), keys)
        high = min(max(borders[1] - begin, low), keys)
        far += (end - begin) * (keys - high + low)
        parts = [(slice(0, low), 0), (slice(low, high), None), (slice(high, keys), last_row)]
        patches += [
            Patch(slice(begin, end), part, row) for part, row in parts if part.start < part.stop
        ]
    return tuple(patches) if far >= MIN_FAR * queries * keys else (Patch(*everything, None),)


def add_pairs(pairs: Tensor, term: Tensor | SpreadProducts) -> None:
    """Add a number of each pair to ``(c, M, W)``; those of bands may be in tiles."""
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


def _add_row_gradients(rows: Tensor | None, sums: Tensor, members: Tensor) -> None:
    """Add the sums of members ``(c, members, D)`` by weight to the gradients of rows, if any."""
    if rows is None:
        return
    if len(rows) == 1:  # one product for all that share it
        sums = sums.flatten(0, 1)[None]
        members = members.flatten(0, 1)[None]
    rows[:, : sums.size(2)].baddbmm_(sums.mT, members)
