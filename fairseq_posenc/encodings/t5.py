"""A trained number for each bucket of distances, shared by all layers (T5).

:class:`Buckets` also serves ``tupe_shared`` and ``deberta_v2``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.precision import make_constant
from fairseq_posenc.encodings.runs import Runs, mirror
from fairseq_posenc.encodings.term import NumbersByDistance, NumbersByPair, Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, subtract_ids

_FARTHEST = 2**40  # tokens: no input is so long


@register("t5")
class T5(Encoding):
    """A trained number for each head and bucket of distances is added to the score.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + b_r, where r is the bucket of j - i, b_r is trained for each
        head, half of the buckets hold one distance each, the other half ranges that grow
        logarithmically up to max_distance.
    Shapes:
        table ``(axes * H, buckets)``, one for all layers.
    Parameters:
        axes * buckets * h
    Source:
        Raffel et al. (2020), "Exploring the Limits of Transfer Learning", arXiv:1910.10683,
        section 2.1; buckets as in the authors' code.
    Differs:
        the scores keep their scale (``scale_factor``), which T5 folds into its initialisation.
        Encoders give half of the buckets to each direction, decoders all to the past. On several
        ``axes`` each has a table, and their numbers are added.
    """

    acts_on = "scores"
    shared_by_layers = True  # one module, called once in a pass

    def __init__(
        self,
        dims: Dims,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        scale_factor: float = 1.0,
        axes: int = 1,
    ) -> None:
        super().__init__(dims, scale_factor)
        self.axes = axes
        self.buckets = Buckets.of_t5(
            self.name, num_buckets, max_distance, both_sides=not dims.causal
        )
        self.table = nn.Parameter(torch.empty(axes * dims.num_heads, num_buckets))

    def terms(self, positions: Positions) -> list[Term]:
        """Add the buckets' numbers, ``(H, R)``, or by pair on several axes."""
        tables = self.table.view(self.axes, self.dims.num_heads, -1)
        if positions.has_axes:
            distances = subtract_ids(positions.ids, positions.tgt_len)
            return [NumbersByPair.of_axes(distances, tables, self.buckets.find)]
        index, runs = self.buckets.select(positions)
        return [NumbersByDistance(tables.sum(0)[:, index], runs)]  # all axes have the same distance


class Buckets(NamedTuple):
    """Buckets of signed distances j - i, each with a row of a table.

    >>> past = Buckets(starts=(-2, -1, 0), rows=(3, 2, 1, 0))  # up to -3; -2; -1; 0 and more
    >>> past.find(torch.tensor([-9, -2, 0, 5]))
    tensor([3, 2, 0, 0])

    Attributes:
        starts: the first distance of each bucket but the first, ascending (:class:`Runs`).
        rows: the row of each bucket.
    """

    starts: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of_t5(cls, name: str, buckets: int, max_distance: int, both_sides: bool) -> Buckets:
        """Make T5's buckets: small distances have one each, large distances share them.

        Args:
            name: the name of the encoding, for error messages.
            buckets: the number of buckets.
            max_distance: from this distance on, all are in the last bucket, which begins earlier.
            both_sides: use half of the buckets for later keys, which otherwise count as distance 0.

        Raises:
            UserError: the numbers do not describe such buckets.
        """
        side = buckets // 2 if both_sides else buckets  # buckets of a direction
        exact = side // 2  # the distances 0 to exact - 1 have a bucket each
        if buckets % 4 or not 0 < exact < max_distance:
            raise UserError(
                f"{name}(num_buckets={buckets},max_distance={max_distance}): num_buckets must be a "
                f"multiple of 4, and max_distance more than the {exact} exact distances"
            )

        def find_bucket(distance: int) -> int:  # among the shared ones; 0 begins at `exact`
            share = math.log(distance / exact) / math.log(max_distance / exact)
            # Where a bucket begins exactly, another library's logarithm may be a little less.
            return int(share * (side - exact) + 1e-6)

        firsts = find_firsts(find_bucket, exact, side - exact - 1)  # inputs reach all buckets
        starts = mirror((*range(1, exact + 1), *firsts), both_sides)
        # Later keys have the rows from `side` on, the first unused: with `side` 4, 3 2 1 0 5 6 7.
        later = range(side + 1, 2 * side) if both_sides else ()
        return cls(starts, (*range(side - 1, -1, -1), *later))

    def select(self, positions: Positions) -> tuple[Tensor, Runs]:
        """Select the rows that a call needs, int64 ``(R,)``, and their runs of distances."""
        kept, runs = Runs.select(self.starts, positions)
        return make_constant(self.rows[kept], positions.device, torch.long), runs

    def find(self, distances: Tensor) -> Tensor:
        """Find the row of each distance, int64 of any shape."""
        starts, rows = (make_constant(x, distances.device, torch.long) for x in self)
        return rows[torch.bucketize(distances.contiguous(), starts, right=True)]


def find_firsts(find_bucket: Callable[[int], int], start: int, count: int) -> tuple[int, ...]:
    """Find the first distance of each of the buckets 1 to ``count``; ``start`` is in bucket 0.

    They are found once, on the CPU, so that a device's rounding cannot move a bucket. A bucket that
    is skipped begins where the next one does; buckets that no input reaches are left out.
    """
    distances = range(_FARTHEST)
    firsts: list[int] = []
    for bucket in range(1, count + 1):
        start = bisect_left(distances, bucket, lo=start, key=find_bucket)
        if start == _FARTHEST:
            break
        firsts.append(start)
    return tuple(firsts)
