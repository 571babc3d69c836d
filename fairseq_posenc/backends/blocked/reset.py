"""Reset of the first token (TUPE): its row and column of the scores do not depend on distance.

Pairs with the first token use two further entries of each table, after its rows by distance: one
where it is the query, one where it is the key. A block's scores and gradients are first computed as
if there were no reset; then two *lines* are overwritten, the row of that query and the column of
that key. Their index may differ between sentences, and may lie outside the block. It stays a
tensor, because reading it would synchronize with the GPU. So every block writes both lines; a line
outside the block writes back the values that are already there.

*Members* are the queries of a block, or its keys if the ``side`` is KEY_SIDE.

Shapes: B batch, H heads, S keys, D head size; G tables (1 for all heads, or one each), R rows of a
table; c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE

# The indices of the two entries in a table.
AT_FIRST_QUERY = -2
AT_FIRST_KEY = -1


class ResetLine(NamedTuple):
    """A row or a column of a block, at another offset in each sentence and head."""

    dim: int  # 1, the row of the first token's query; 2, the column of its key
    offset: Tensor  # within the block, clamped to it, `(c, 1, 1)`
    inside: Tensor  # False where the offset was clamped, `(c, 1, 1)`: the line is not in the block

    def select(self, x: Tensor) -> Tensor:
        """Copy the line out of ``(c, M, W)``: ``(c, 1, W)`` or ``(c, M, 1)``."""
        return x.gather(self.dim, self._expand_offset(x))

    def select_number(self, table: Tensor) -> Tensor:
        """Select the line's entry in a table of numbers, ``(G, R)``: ``(G, 1, 1)``."""
        return table[:, AT_FIRST_QUERY if self.dim == 1 else AT_FIRST_KEY, None, None]

    def put(self, x: Tensor, line: Tensor) -> None:
        """Overwrite the line in ``(c, M, W)``."""
        x.scatter_(self.dim, self._expand_offset(x), torch.where(self.inside, line, self.select(x)))

    def take(self, x: Tensor) -> Tensor:
        """Copy the line out of ``(c, M, W)``, and zero it there; outside the block, zeros."""
        line = self.select(x)
        x.scatter_(self.dim, self._expand_offset(x), torch.where(self.inside, 0.0, line))
        return torch.where(self.inside, line, 0.0)

    def scatter_sum(self, x: Tensor, size: int) -> Tensor:
        """Sum a line that was taken, for its token; the result has zeros for all other tokens.

        Returns:
            ``(c, size, 1)`` of the row, ``(c, 1, size)`` of the column; ``size`` is M or W.
        """
        sums = x.sum(3 - self.dim, keepdim=True)  # along the line
        shape = list(sums.shape)
        shape[self.dim] = size
        return sums.new_zeros(shape).scatter_(self.dim, self.offset, sums)

    def _expand_offset(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return self.offset.expand(shape)


class ResetLines(NamedTuple):
    """The column and the row of a block. Where they cross the row counts: put last, taken first."""

    reset_column: ResetLine
    reset_row: ResetLine

    @classmethod
    def locate(cls, first_token: Tensor, block: Block, src_len: int) -> ResetLines:
        """Locate the lines in a block.

        Queries are numbered from the last token back: query n is the token S - 1 - n.

        Args:
            first_token: its index among the keys, ``(c, 1, 1)``; -1 for none: its column lies
                outside every block, its row among the padding behind the queries if anywhere.
            block: its ranges of queries and of keys.
            src_len: S.
        """
        queries, keys = block.shape
        column = first_token - block.keys.start
        row = (src_len - 1 - block.queries.start) - first_token
        nearest_column = column.clamp(0, keys - 1)
        nearest_row = row.clamp(0, queries - 1)
        return cls(
            reset_column=ResetLine(dim=2, offset=nearest_column, inside=nearest_column == column),
            reset_row=ResetLine(dim=1, offset=nearest_row, inside=nearest_row == row),
        )

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Move column and row out of ``(c, M, W)``, leaving zeros."""
        row = self.reset_row.take(x)
        return self.reset_column.take(x), row

    def multiply(self, table: Tensor, tokens: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Multiply with a table's two entries, for column and row.

        Args:
            table: ``(G, R, D)``.
            tokens: queries or keys of the block, ``(c, members, D)``.
            side: QUERY_SIDE or KEY_SIDE.

        Returns:
            ``(c, M, 1)`` and ``(c, 1, 1)`` of queries, ``(c, 1, 1)`` and ``(c, 1, W)`` of keys.
        """
        products = tokens @ expand_reset_rows(table, tokens).transpose(1, 2)  # [c, members, 2]
        row, column = products.split(1, -1)  # by the entries of the first query and key
        if side == QUERY_SIDE:
            return column, self.reset_row.select(row)
        return self.reset_column.select(column.mT), row.mT

    def sum_by_member(self, column: Tensor, row: Tensor, side: int) -> Tensor:
        """Transpose :meth:`multiply`: sum column and row by member and entry, ``(c, members, 2)``.

        Args:
            column: weights or gradients of its pairs, ``(c, M, 1)``.
            row: weights or gradients of its pairs, ``(c, 1, W)``.
            side: QUERY_SIDE or KEY_SIDE.
        """
        if side == QUERY_SIDE:
            return torch.cat([self.reset_row.scatter_sum(row, column.size(1)), column], 2)
        return torch.cat([row, self.reset_column.scatter_sum(column, row.size(2))], 1).mT


def find_first_tokens(first: Tensor, batch: int, heads: int) -> Tensor:
    """Find the index of each first token, ``(B, H, 1, 1)``; -1 for a sentence without one.

    Args:
        first: True at the first token, ``(B or 1, S)``.
        batch: B.
        heads: H.
    """
    index = first.long().argmax(1).masked_fill(~first.any(1), -1)  # [B or 1]
    return index[:, None, None, None].expand(batch, heads, 1, 1)


def expand_reset_rows(table: Tensor, like: Tensor) -> Tensor:
    """Expand a table's two entries to all pairs of sentence and head, ``(c, 2, D)``, a view.

    A table for each head comes with chunks of one sentence, so that G is 1 or c.
    """
    return table[:, AT_FIRST_QUERY:].expand(like.size(0), -1, -1)


def add_reset_rows(total: Tensor | None, grad: Tensor) -> None:
    """Add the entries' gradients ``(c, 2, ...)`` to that of their table, summed if all share it."""
    if total is not None:
        total[:, AT_FIRST_QUERY:] += grad.sum_to_size(total.size(0), *grad.shape[1:])
