"""Runs of distances that share a row of a table: clipped tables, buckets of any kind.

A table holds each distinct row once, so that a projection, a product with queries or keys, or a
gradient of a row is computed once for all of its distances. Distances are signed, j - i for key j
and query i; the runs follow each other without gaps, from low distances to high ones.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.positions import Positions, subtract_ids
from fairseq_posenc.precision import make_constant

FAR = 2**62  # a distance beyond all others


class Runs(NamedTuple):
    """The runs of a table, one for each row.

    Row n serves the distances from ``starts[n - 1]`` to below ``starts[n]``; the first row serves
    all smaller distances, the last row all larger ones. With ``starts = (-1, 0, 1)``, there is a
    row for the distances up to -2, one for -1, one for 0, and one for 1 and more.

    Attributes:
        starts: the first distance of each row but the first one, ascending; a ``range`` if each row
            but the first and last serves a single distance. Between two equal starts lies a row
            without a distance.
        low: the lowest distance of a key from a query in the call; with ids, below all distances.
        high: the highest distance; with ids, above all.
        device: device of the table.
        ids: positions of the keys, ``(B or 1, S)`` or on several axes ``(B or 1, S, axes)``, if
            distances are differences of these, whole numbers in any order; None if they are
            differences of the tokens' indices.
        tgt_len: T, if there are ids; the queries are the last T tokens.
    """

    starts: Sequence[int]
    low: int
    high: int
    device: torch.device = torch.device("cpu")
    ids: Tensor | None = None
    tgt_len: int = 0

    @classmethod
    def select(cls, starts: Sequence[int], positions: Positions) -> "tuple[slice, Runs | None]":
        """Select the rows that the distances of a call need, as a slice; see :meth:`trim`."""
        starts = starts if isinstance(starts, range) else tuple(starts)  # hashable, as caches need
        runs = cls(starts, 1 - positions.src_len, positions.tgt_len - 1, positions.device)
        if not positions.consecutive:  # ids that do not grow by one from token to token
            runs = runs._replace(low=-FAR, high=FAR, ids=positions.ids, tgt_len=positions.tgt_len)
        return runs.trim()

    def trim(self) -> "tuple[slice, Runs | None]":
        """Leave out rows without a distance in the call; return the others' slice, and their runs.

        The runs are None if each distance then has its own row. A graph of ``torch.compile`` serves
        every length, so it keeps all rows and their runs.
        """
        if torch.compiler.is_compiling():
            return slice(None), self
        # The row of a distance is the number of starts up to it.
        first, last = bisect_right(self.starts, self.low), bisect_right(self.starts, self.high)
        kept, starts = slice(first, last + 1), self.starts[first:last]
        if self.ids is None and len(starts) == self.high - self.low:
            distances = range(self.low + 1, self.high + 1)  # all but the first
            if starts == (distances if isinstance(starts, range) else tuple(distances)):
                return kept, None
        return kept, self._replace(starts=starts)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.starts) + 1

    def find(self, distances: Tensor) -> Tensor:
        """Find the row of each distance, int64 of any shape, also of distances not in the call."""
        if not self.starts:  # a single row serves all distances
            return torch.zeros_like(distances)
        if isinstance(self.starts, range):
            return distances.clamp(self.starts[0] - 1, self.starts[-1]) - (self.starts[0] - 1)
        starts = make_constant(self.starts, distances.device, torch.long)
        return torch.bucketize(distances.contiguous(), starts, right=True)

    def find_pairs(self, first: Tensor | None) -> Tensor:
        """Find the row of each pair of query and key by the ids, ``(B or 1, T, S)``.

        Several axes, which have no reset, give rows for each axis, ``(B or 1, T, S, axes)``.

        Args:
            first: ``(B or 1, S)`` of bool, a sentence's first real token. Its pairs have the two
                last rows of the table (a *reset*): as the query, and as the key. None: no reset.
        """
        assert self.ids is not None
        rows = self.find(subtract_ids(self.ids, self.tgt_len))
        if first is None:
            return rows
        query_is_first = first[:, first.size(1) - self.tgt_len :, None]
        rows = torch.where(first[:, None], self.num_rows + 1, rows)
        return torch.where(query_is_first, self.num_rows, rows)

    def expand(self, table: Tensor) -> Tensor:
        """Repeat the rows of G tables, ``(G, R, ...)``, so that each distance has a row.

        The rows of a reset (:meth:`find_pairs`) stay last. Not for ids: they bound no distances.
        """
        starts = self.starts
        # Of a range, only the first and the last row serve several distances, and here the call
        # must need both. A compiled graph serves all lengths, so it must not compare them.
        is_range = isinstance(starts, range) and not torch.compiler.is_compiling()
        if not (is_range and starts and self.low < starts[0] <= starts[-1] <= self.high):
            return self.look_up(table, torch.arange(self.low, self.high + 1, device=self.device))
        distinct, reset = table[:, : self.num_rows], table[:, self.num_rows :]
        # Repeated ends are cheaper than an index, and their gradient is deterministic.
        groups, row_shape = distinct.size(0), distinct.shape[2:]
        below = distinct[:, :1].expand(groups, starts[0] - 1 - self.low, *row_shape)
        above = distinct[:, -1:].expand(groups, self.high - starts[-1], *row_shape)
        return torch.cat([below, distinct, above, reset], 1)

    def look_up(self, table: Tensor, distances: Tensor) -> Tensor:
        """Select the row of each distance, ``(n,)``, and the rows of a reset (:meth:`expand`)."""
        distinct, reset = table[:, : self.num_rows], table[:, self.num_rows :]
        return torch.cat([distinct.index_select(1, self.find(distances)), reset], 1)

    def without_first(self, count: int) -> "tuple[int, Runs | None]":
        """Leave out the ``count`` lowest distances, for a call without the first ``count`` keys.

        Returns:
            The number of rows that only these distances need, and the runs of the other rows. The
            number is 0 while torch compiles, and with ids, whose order is not the keys'.
        """
        if self.ids is not None:
            return 0, self._replace(ids=self.ids[:, count:])
        kept, runs = self._replace(low=self.low + count).trim()
        return kept.start or 0, runs  # while torch compiles, the start is None: all rows are kept
