"""A trained number for each bucket of distances, shared by all layers (T5).

:class:`Buckets` also serves ``tupe_shared`` and ``deberta_v2``.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import Term, sum_over_axes
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from fairseq_posenc.precision import make_constant

_FARTHEST = 2**40  # tokens: no input is so long, and `max_distance` of a spec is at most 10^6


@register("t5")
class T5(Encoding):
    """A trained number for each head and bucket of distances is added to the score.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + b_r, where r is the bucket of j - i, b_r is trained for each
        head, half of the buckets hold one distance each, the other half ranges that grow
        exponentially up to max_distance. Encoders give half of the buckets to each direction,
        decoders all to the past.
    Shapes:
        table ``(axes * H, buckets)``, one for all layers.
    Parameters:
        axes * buckets * h
    Source:
        Raffel et al. (2020), "T5", arXiv:1910.10683, section 2.1; buckets as in the authors' code.
    Differs:
        the scores keep their scale (``scale_factor``), which T5 folds into its initialization.
        On several ``axes`` each has a table, and their numbers are added.
    """

    acts_on = "scores"
    shared_by_layers = True  # one module, called once in a pass
    rows_depend_on_causal = True  # loading copies no rows between encoders and decoders

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
        self.bucket_rule = Buckets.of_t5(self.name, num_buckets, max_distance, not dims.causal)
        self.table = nn.Parameter(torch.empty(axes * dims.num_heads, num_buckets))

    def terms(self, positions: Positions) -> list[Term]:
        """Add the buckets' numbers, by distance or, on several axes, by pair."""
        index, runs = self.bucket_rule.select(positions)  # of the call's R buckets
        tables = self.table.view(self.axes, self.dims.num_heads, -1)[..., index]  # [axes, H, R]
        return [sum_over_axes(tables, runs)]


class Buckets(NamedTuple):
    """Buckets of signed distances j - i, each with a row of a table.

    >>> past = Buckets(starts=(-2, -1, 0), rows=(3, 2, 1, 0))  # up to -3; -2; -1; 0 and more

    Attributes:
        starts: the first distance of each bucket but the first, ascending (:class:`Runs`).
        rows: the row of each bucket.
    """

    starts: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of_t5(cls, name: str, buckets: int, max_distance: int, both_sides: bool) -> "Buckets":
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

        def find_bucket(distance: int) -> int:
            if distance < exact:
                return distance
            share = math.log(distance / exact) / math.log(max_distance / exact)
            # Where a bucket begins exactly, another library's logarithm may be a little less.
            return exact + int(share * (side - exact) + 1e-6)

        starts = find_starts(find_bucket, side - 1, both_sides)  # all begin before `_FARTHEST`
        # Later keys have the rows from `side` on, the first unused: with `side` 4, 3 2 1 0 5 6 7.
        later = range(side + 1, 2 * side) if both_sides else ()
        return cls(starts, (*range(side - 1, -1, -1), *later))

    def select(self, positions: Positions) -> tuple[Tensor, Runs | None]:
        """Select the rows that a call needs, int64 ``(R,)``, and which distances share one."""
        kept, runs = Runs.select(self.starts, positions)
        return make_constant(self.rows[kept], positions.device, torch.long), runs


def find_starts(
    find_bucket: Callable[[int], int], last: int, both_sides: bool = True
) -> tuple[int, ...]:
    """Find :attr:`Runs.starts` of signed distances from the buckets of unsigned ones.

    >>> find_starts(lambda distance: min(distance, 2), last=2)  # up to -2, -1, 0, 1, 2 and more
    (-1, 0, 1, 2)

    They are found once, on the CPU, so that a device's rounding cannot move a bucket. A bucket that
    is skipped begins where the next one does; buckets that no input reaches are left out.

    Args:
        find_bucket: returns the bucket of a distance; 0 for distance 0, and it never falls.
        last: the last bucket.
        both_sides: whether later keys also have such buckets; otherwise they count as distance 0.
    """
    begins = [bisect_left(range(_FARTHEST), x, key=find_bucket) for x in range(1, last + 1)]
    begins = [x for x in begins if x < _FARTHEST]  # first distances of the buckets that are reached
    earlier = tuple(1 - x for x in reversed(begins))  # before the query, a bucket ends at -x
    return (*earlier, *begins) if both_sides else earlier
