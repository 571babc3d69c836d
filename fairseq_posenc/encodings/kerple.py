"""Kernelised distances (KERPLE, logarithmic): a trained function of the distance."""

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span

MIN_PARAMETER = 1e-2  # r1 and r2 are clamped to it, as in the authors' code


@register("kerple")
class Kerple(Encoding):
    """A trained penalty that grows with the logarithm of the distance is subtracted.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) - r1 * log(1 + r2 * abs(j - i)), where r1 and r2 are
        positive and trained for each head.
    Shapes:
        r1 and r2 ``(H,)`` in each layer.
    Parameters:
        m * 2 * h
    Source:
        Chi et al. (2022), "KERPLE: Kernelized Relative Positional Embedding for Length
        Extrapolation", arXiv:2205.09921, the logarithmic variant.
    Differs:
        r1 starts uniform in (0, 2), r2 in (0, 1); both are kept at 0.01 or more.
    """

    acts_on = "scores"
    takes_ids = "real"

    def __init__(self, dims: Dims, *, scale_factor: float = 1.0) -> None:
        super().__init__(dims)
        self.scale_factor = scale_factor
        self.r1 = nn.Parameter(torch.empty(dims.num_heads))
        self.r2 = nn.Parameter(torch.empty(dims.num_heads))

    def reset_parameters(self) -> None:
        """Draw r1 and r2."""
        nn.init.uniform_(self.r1, 0, 2)
        nn.init.uniform_(self.r2, 0, 1)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute minus the penalties as bias, ``(H, R)``, or by pair, in float32 at least."""
        return Terms.by_distance(span, self._bias, self.scale_factor)

    def _bias(self, distances: Tensor) -> Tensor:
        """Compute minus the penalty of each head at distances ``(n,)``, ``(H, n)``."""
        distances = distances.abs().to(torch.promote_types(self.r1.dtype, torch.float32))
        r1 = self.r1.clamp(min=MIN_PARAMETER)[:, None]  # [H, 1]
        r2 = self.r2.clamp(min=MIN_PARAMETER)[:, None]
        return -r1 * torch.log1p(r2 * distances)
