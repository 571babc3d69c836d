"""A trained number for each bucket of distances, shared by all layers (T5)."""

import math

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("t5")
class T5(Encoding):
    """A trained number for each head and bucket of distances is added to the score.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + b_r, where r is the bucket of j - i, b_r is trained for each
        head, half of the buckets hold one distance each, the other half ranges that grow
        logarithmically up to max_distance.
    Shapes:
        table ``(H, buckets)``, one for all layers.
    Parameters:
        buckets * h
    Source:
        Raffel et al. (2020), "Exploring the Limits of Transfer Learning", arXiv:1910.10683,
        section 2.1; buckets as in the authors' code.
    Differs:
        the scores keep their scale, which T5 folds into its initialisation (``scale_factor``).
        Encoders give half of the buckets to each direction, decoders all to the past.
    """

    acts_on = "scores"
    shared = True

    def __init__(
        self,
        dims: Dims,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        scale_factor: float = 1.0,
    ) -> None:
        super().__init__(dims)
        check_buckets(self.name, num_buckets, max_distance, not dims.causal)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.scale_factor = scale_factor
        self.table = nn.Parameter(torch.empty(dims.num_heads, num_buckets))

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Look up the buckets' numbers as bias, ``(H, R)``."""
        index = bucket_distances(
            span.distances(), self.num_buckets, self.max_distance, not self.dims.causal
        )
        return Terms(bias=self.table[:, index], scale_factor=self.scale_factor)


def check_buckets(name: str, buckets: int, max_distance: int, both_sides: bool) -> None:
    """Refuse numbers for which :func:`bucket_distances` has no meaning."""
    exact = buckets // (4 if both_sides else 2)
    if buckets % 4 or not 0 < exact < max_distance:
        raise UserError(
            f"{name}(num_buckets={buckets},max_distance={max_distance}): num_buckets must be a "
            f"multiple of 4, and max_distance more than the {exact} exact distances"
        )


def bucket_distances(
    distances: Tensor, buckets: int, max_distance: int, both_sides: bool
) -> Tensor:
    """Compute T5's bucket of each signed distance j - i, of the same shape.

    Args:
        distances: int64, any shape.
        buckets: their number.
        max_distance: where the last one begins.
        both_sides: give half of them to later keys, which otherwise count as distance 0.
    """
    side = buckets // 2 if both_sides else buckets
    steps = distances.abs() if both_sides else -distances.clamp(max=0)
    exact = side // 2
    # At least `exact` steps, so that the logarithm is of 1 or more.
    grown = (steps.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    # Where a bucket begins exactly, another library's logarithm may be a little less.
    logarithmic = (exact + (grown * (side - exact) + 1e-6).long()).clamp(max=side - 1)
    bucket = torch.where(steps < exact, steps, logarithmic)
    return bucket + side * distances.gt(0) if both_sides else bucket
