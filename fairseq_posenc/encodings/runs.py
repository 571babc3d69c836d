"""Runs of distances that share a row of a table: clipped tables, buckets of any kind.

A table holds each distinct row once, so that a projection, a product with queries or keys, or a
gradient of a row is computed once for all of its distances. Distances are signed, j - i for key j
and query i; the runs follow each other without gaps, from low distances to high ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.encodings.precision import make_constant
from fairseq_posenc.positions import Span


class Runs(NamedTuple):
    """The runs of a table, one for each row.

    Row n serves the distances from ``starts[n - 1]`` to below ``starts[n]``; the first row serves
    all smaller distances, the last row all larger ones. With ``starts = (-1, 0, 1)``, there is a
    row for the distances up to -2, one for -1, one for 0, and one for 1 and more.

    Attributes:
        starts: the first distance of each row but the first one, ascending; a ``range`` if each row
            but the first and last serves a single distance. Between two equal starts lies a row
            without a distance.
        span: the distances that a call needs.
    """

    starts: Sequence[int]
    span: Span

    @classmethod
    def select(cls, starts: Sequence[int], span: Span) -> tuple[slice, Runs]:
        """Select the rows that a span needs, as a slice, and their runs.

        A graph of ``torch.compile`` serves every length, so it selects all rows.
        """
        if torch.compiler.is_compiling():
            return slice(None), cls(starts, span)
        first_row, last_row = bisect_right(starts, span.low), bisect_right(starts, span.high)
        return slice(first_row, last_row + 1), cls(starts[first_row:last_row], span)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.starts) + 1

    @property
    def is_whole(self) -> bool:
        """Whether each distance of the span has its own row; False while torch compiles."""
        if torch.compiler.is_compiling() or self.span.ids is not None:
            return False
        distances = range(self.span.low + 1, self.span.high + 1)  # all but the first
        if isinstance(self.starts, range):
            return self.starts == distances
        return len(self.starts) == len(distances) and tuple(self.starts) == tuple(distances)

    def representatives(self) -> Tensor:
        """List a distance of each row: the last one of the first row, the first ones of others."""
        distances = (self.starts[0] - 1, *self.starts) if self.starts else (self.span.low,)
        return make_constant(distances, self.span.device, torch.long)

    def find(self, distances: Tensor) -> Tensor:
        """Find the row of each distance, int64 of any shape; distances may lie outside the span."""
        if not self.starts:
            return torch.zeros_like(distances)
        if isinstance(self.starts, range):
            lowest = self.starts[0] - 1
            return distances.clamp(lowest, self.starts[-1]) - lowest
        starts = make_constant(self.starts, distances.device, torch.long)
        return torch.bucketize(distances, starts, right=True)

    def find_pairs(self, first: Tensor | None) -> Tensor:
        """Find the row of each pair of query and key by the span's ids, ``(B or 1, T, S)``.

        Args:
            first: ``(B or 1, S)`` of bool, the first real token of each row, whose pairs have two
                rows after all others (a *reset*): as the query, and as the key. None: no reset.
        """
        rows = self.find(self.span.differences())
        if first is None:
            return rows
        query_is_first = first[:, first.size(1) - self.span.tgt_len :, None]
        rows = torch.where(first[:, None], self.num_rows + 1, rows)
        return torch.where(query_is_first, self.num_rows, rows)

    def expand(self, table: Tensor, dim: int) -> Tensor:
        """Repeat rows along their runs, so that each distance of the span has a row.

        Args:
            table: has rows in dimension ``dim``; those of a reset (:meth:`find_pairs`) stay last.
            dim: the dimension of the rows.
        """
        if not self._repeats_only_ends:
            return self.look_up(table, dim, self.span.distances())
        distinct, reset = table.split([self.num_rows, table.size(dim) - self.num_rows], dim)
        # Repeated ends are cheaper than an index, and their gradient is deterministic.
        sizes = list(distinct.shape)
        sizes[dim] = self.starts[0] - 1 - self.span.low
        below = distinct.narrow(dim, 0, 1).expand(sizes)
        sizes[dim] = self.span.high - self.starts[-1]
        above = distinct.narrow(dim, self.num_rows - 1, 1).expand(sizes)
        return torch.cat([below, distinct, above, reset], dim)

    def look_up(self, table: Tensor, dim: int, distances: Tensor) -> Tensor:
        """Select the row of each distance, ``(n,)``; arguments as for :meth:`expand`."""
        distinct, reset = table.split([self.num_rows, table.size(dim) - self.num_rows], dim)
        return torch.cat([distinct.index_select(dim, self.find(distances)), reset], dim)

    @property
    def _repeats_only_ends(self) -> bool:
        """Whether only the first and last row serve several distances, and the span needs both."""
        if torch.compiler.is_compiling() or not isinstance(self.starts, range) or not self.starts:
            return False
        return self.span.low < self.starts[0] and self.starts[-1] <= self.span.high

    def select_keys(self, indices: slice | Tensor) -> Runs:
        """Keep only the ids of some keys, by index; the span must have ids."""
        assert self.span.ids is not None
        return self._replace(span=self.span._replace(ids=self.span.ids[:, indices]))

    def without_first(self, count: int) -> tuple[int, Runs]:
        """Leave out the ``count`` lowest distances, for a call without the first ``count`` keys.

        Returns:
            The number of rows that only these distances need, and the runs of the other rows. The
            number is 0 while torch compiles, and if the span has ids, whose order is not the keys'.
        """
        if self.span.ids is not None:
            return 0, self.select_keys(slice(count, None))
        span = self.span._replace(low=self.span.low + count)
        kept, runs = Runs.select(self.starts, span)
        return kept.start or 0, runs  # while torch compiles, the start is None: all rows are kept


def mirror(starts: Sequence[int], both_sides: bool = True) -> tuple[int, ...]:
    """Compute :attr:`Runs.starts` of signed distances from the runs of unsigned distances.

    >>> mirror((1, 4))  # 0, 1 to 3, and 4 or more: up to -4, -3 to -1, 0, 1 to 3, 4 or more
    (-3, 0, 1, 4)

    Args:
        starts: the distances of at least 1 at which runs begin, ascending.
        both_sides: whether later keys have such runs, too; otherwise they count as distance 0.
    """
    earlier = tuple(1 - start for start in reversed(starts))
    return (*earlier, *starts) if both_sides else earlier
