"""A small network on the relative distance (FIRE).

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.precision import no_autocast
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("fire")
class Fire(Encoding):
    """A small network turns a key's distance, relative to the largest possible one, into a bias.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + f(log(1 + a (i - j)) / log(1 + a max(i, L))), where f has a
        hidden layer of ``width`` ReLUs and an output for each head, a (the paper's c) and L are
        trained, and c is ``scale_factor``.
    Shapes:
        weights ``(width, 1)``, ``(H, width)`` and their biases, a and L in each layer.
    Parameters:
        m * (2 * width + h * width + h + 2)
    Source:
        Li et al. (2024), "Functional Interpolation for Relative Positions Improves Long Context
        Transformers", arXiv:2310.04418, equation 7; starting values as there.
    Differs:
        for causal models only, as in the paper. The absolute values of a and L are taken.
    """

    acts_on = "scores"
    takes_ids = "real"
    causal_reason = "it counts how far back a key lies"
    cost = Cost(common_operations="64 h n^2 + 96 n^2", common_numbers="32 n^2")  # for width=32

    def __init__(
        self, dims: Dims, *, width: int = 32, threshold: float = 512.0, scale_factor: float = 1.0
    ) -> None:
        super().__init__(dims)
        self.scale_factor = scale_factor
        self.threshold = threshold
        self.hidden_weight = nn.Parameter(torch.empty(width, 1))
        self.hidden_bias = nn.Parameter(torch.empty(width))
        self.output_weight = nn.Parameter(torch.empty(dims.num_heads, width))
        self.output_bias = nn.Parameter(torch.empty(dims.num_heads))
        self.curvature = nn.Parameter(torch.empty(()))  # a
        self.length = nn.Parameter(torch.empty(()))  # L, in units of the threshold

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``nn.Linear`` does, and set a = 0.1 and L = threshold."""
        for weight, bias in (
            (self.hidden_weight, self.hidden_bias),
            (self.output_weight, self.output_bias),
        ):
            bound = weight.size(1) ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
        nn.init.constant_(self.curvature, 0.1)
        nn.init.constant_(self.length, 1.0)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the network's outputs by pair, ``(B or 1, H, T, S)``, in float32 at least."""
        dtype = torch.promote_types(self.curvature.dtype, torch.float32)
        keys = positions.common_ids().to(dtype)  # [B or 1, S]
        queries = positions.queries(keys)[:, :, None]  # [B or 1, T, 1]
        # i - j. Later keys are hidden, but logarithms of their distances must be finite.
        distances = (queries - keys[:, None, :]).clamp(min=0)  # [B or 1, T, S]
        farthest = torch.maximum(queries, (self.length * self.threshold).abs())
        curvature = self.curvature.abs()
        relative = torch.log1p(curvature * distances) / torch.log1p(curvature * farthest)
        hidden = relative[..., None] * self.hidden_weight[:, 0] + self.hidden_bias
        hidden = torch.relu(hidden)  # [B or 1, T, S, width]
        with no_autocast(hidden.device):
            bias = hidden @ self.output_weight.to(dtype).T  # matrix products need equal types
        bias = bias + self.output_bias  # [B or 1, T, S, H]
        return Terms(pair_bias=bias.permute(0, 3, 1, 2), scale_factor=self.scale_factor)
