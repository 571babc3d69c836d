"""Dot products of sinusoids as a bias (Sandwich): a fixed function of the distance j - i."""

import math

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.precision import make_constant
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("sandwich")
class Sandwich(Encoding):
    """The dot product of the two positions' sinusoids, weaker from head to head, is added.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + H / (8 h) * (sum_s cos((j - i) / 10000^(2s/w)) - w / 2),
        where s = 1 .. w/2 and h = 1 .. H numbers the heads.
    Shapes:
        bias ``(H, R)``, one for all layers.
    Parameters:
        0
    Source:
        Chi et al. (2023), "Dissecting Transformer Length Extrapolation via the Lens of Receptive
        Field Analysis", arXiv:2212.10356.
    Differs:
        w is ``width``, not the head's size. The constant -w/2, which the softmax ignores, keeps the
        bias at 0 for distance 0. Not compared with the authors' code.
    """

    acts_on = "scores"
    shared_by_layers = True

    def __init__(self, dims: Dims, *, width: int = 128, scale_factor: float = 1.0) -> None:
        super().__init__(dims)
        if width < 2 or width % 2:
            raise UserError(f"sandwich(width={width}): the width must be even, and at least 2")
        self.width = width
        self.scale_factor = scale_factor

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the dot products as bias in float32, ``(H, R)``, or by pair."""
        return Terms.by_distance(span, self._multiply, self.scale_factor)

    def _multiply(self, distances: Tensor) -> Tensor:
        """Compute the dot products of each head at distances ``(n,)``, ``(H, n)``."""
        half = self.width // 2
        # Turns per position in whole units of 2^-40: their multiples are exact, and the rest after
        # whole turns is a small angle, so no float64 is needed.
        turns = [10000.0 ** -(s / half) / (2 * math.pi) for s in range(1, half + 1)]
        units = make_constant([round(x * 2**40) for x in turns], distances.device, torch.long)
        rest = (distances[:, None] * units).bitwise_and(2**40 - 1)  # [n, w/2]
        angles = rest.float() * (2 * math.pi / 2**40)
        heads = torch.arange(1, self.dims.num_heads + 1, device=distances.device)[:, None]
        return (angles.cos().sum(-1) - half) * self.dims.num_heads / (8 * heads)
