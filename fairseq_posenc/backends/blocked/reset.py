"""Reset of the first token (TUPE): its row and column of the scores do not depend on distance.

They have two table rows of their own, behind the rows by distance. A block's scores and gradients
are first computed as if there were no reset; then this row and column are overwritten. Their
position may differ between sentences, and may lie outside the block. It stays a tensor, because
reading it would synchronize with the GPU. So every block writes both lines; a line that lies
outside the block writes back the values that are already there.

A *line* is this row or column. *Members* are the queries of a block, or its keys if the ``side`` is
that of keys.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table; c pairs of sentence and head in a chunk, M queries and W keys of a block, N queries
or keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE

ROW_OF_FIRST_QUERY, ROW_OF_FIRST_KEY = -2, -1  # table rows behind those by distance


class ResetLine(NamedTuple):
    """A row or a column of a block, at a place of its own in each sentence and head."""

    dim: int  # 1, the row of the first token's query; 2, the column of its key
    place: Tensor  # index within the block, clamped to it, `(c, 1, 1)`
    inside: Tensor  # False where the index was clamped, `(c, 1, 1)`: the line is not in the block

    def select(self, x: Tensor) -> Tensor:
        """Copy the line out of ``(c, M, W)``: ``(c, 1, W)`` or ``(c, M, 1)``."""
        return x.gather(self.dim, self._index(x))

    def put(self, x: Tensor, line: Tensor) -> None:
        """Overwrite the line in ``(c, M, W)``."""
        x.scatter_(self.dim, self._index(x), torch.where(self.inside, line, self.select(x)))

    def take(self, x: Tensor) -> Tensor:
        """Copy the line out of ``(c, M, W)`` and zero it there; zeros if outside the block."""
        line = self.select(x)
        x.scatter_(self.dim, self._index(x), torch.where(self.inside, 0.0, line))
        return torch.where(self.inside, line, 0.0)

    def scatter_sum(self, x: Tensor, size: int) -> Tensor:
        """Sum over a line that was taken, and scatter the sum to the line's index among zeros.

        Returns:
            ``(c, size, 1)`` of the row, ``(c, 1, size)`` of the column.
        """
        sums = x.sum(3 - self.dim, keepdim=True)
        shape = list(sums.shape)
        shape[self.dim] = size
        return sums.new_zeros(shape).scatter_(self.dim, self.place, sums)

    def _index(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return self.place.expand(shape)


class ResetLines(NamedTuple):
    """The row and the column of a block. The row wins where they cross: put last, taken first."""

    reset_column: ResetLine
    reset_row: ResetLine

    @classmethod
    def locate(cls, place: Tensor, block: Block, src_len: int) -> ResetLines:
        """Locate the lines in a block.

        Args:
            place: index of the first token among the keys, ``(c, 1, 1)``; -1 for none.
            block: its ranges of (reversed) queries and of keys.
            src_len: number of keys, S.
        """
        queries, keys = block.shape
        at_key, at_query = place - block.keys.start, (src_len - 1 - block.queries.start) - place
        key, query = at_key.clamp(0, keys - 1), at_query.clamp(0, queries - 1)
        return cls(ResetLine(2, key, key == at_key), ResetLine(1, query, query == at_query))

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Move column and row out of ``(c, M, W)``, leaving zeros."""
        row = self.reset_row.take(x)
        return self.reset_column.take(x), row

    def multiply(self, table: Tensor, tokens: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Multiply with a table's two rows, for column and row.

        Args:
            table: ``(G, R, D)``.
            tokens: queries or keys of the block, ``(c, members, D)``.
            side: whether these are queries or keys.

        Returns:
            ``(c, M, 1)`` and ``(c, 1, 1)`` of queries, ``(c, 1, 1)`` and ``(c, 1, W)`` of keys.
        """
        products = tokens @ expand_reset_rows(table, tokens).transpose(1, 2)  # [c, members, 2]
        if side == QUERY_SIDE:  # [c, M, 1], [c, 1, 1]
            return products[..., 1:], self.reset_row.select(products[..., :1])
        products = products.transpose(1, 2)  # [c, 2, members]
        return self.reset_column.select(products[:, 1:]), products[:, :1]

    def sum_by_member(self, column: Tensor, row: Tensor, side: int) -> Tensor:
        """Sum each member's pairs in the row, and in the column, ``(c, members, 2)``."""
        if side == QUERY_SIDE:
            return torch.cat([self.reset_row.scatter_sum(row, column.size(1)), column], 2)
        return torch.cat([row, self.reset_column.scatter_sum(column, row.size(2))], 1).transpose(
            1, 2
        )


def find_first_tokens(first: Tensor, batch: int, heads: int) -> Tensor:
    """Find the index of each first token, ``(B, H, 1, 1)``; -1 for a sentence without one.

    Args:
        first: True at the first token, ``(B or 1, S)``.
        batch: B.
        heads: H.
    """
    place = first.long().argmax(1).masked_fill(~first.any(1), -1)  # [B or 1]
    return place[:, None, None, None].expand(batch, heads, 1, 1)


def expand_reset_rows(table: Tensor, like: Tensor) -> Tensor:
    """Expand a table's two rows to all pairs of sentence and head, ``(c, 2, D)``, a view."""
    return table[:, ROW_OF_FIRST_QUERY:].expand(like.size(0), -1, -1)


def add_reset_rows(total: Tensor | None, x: Tensor) -> None:
    """Add ``(c, 2, ...)``, summed over what shares a table, to the two rows of its gradient."""
    if total is not None:
        total[:, ROW_OF_FIRST_QUERY:] += x.sum_to_size(total.size(0), *x.shape[1:])
