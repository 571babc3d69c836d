"""A trained number for each unsigned distance, multiplying the score (Huang's method 1)."""

from typing import Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("m1")
class M1(Encoding):
    """The dot product is multiplied by a trained number for each unsigned distance.

    Equation:
        e_ij = (q_i.k_j) * a_s / sqrt(c d), where s = min(abs(j - i), K) and a_s is a number.
    Shapes:
        table ``(G, K+1)`` in each layer.
    Parameters:
        m * (K+1)
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 1.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    acts_on = "scores"

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        scale_factor: float = 1.0,
    ) -> None:
        super().__init__(dims)
        self.max_distance = dims.max_positions - 1 if max_distance is None else max_distance
        self.scale_factor = scale_factor
        groups = dims.num_heads if per_head else 1
        self.table = nn.Parameter(torch.empty(groups, self.max_distance + 1))

    def reset_parameters(self) -> None:
        """Start from plain attention."""
        nn.init.ones_(self.table)

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a loaded table to this one's reach, its last number repeated."""
        missing = max(self.table.size(1) - weight.size(1), 0)
        return torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows as gain, ``(G, R)``."""
        rows = self.table[:, span.distances().abs().clamp(max=self.max_distance)]  # [G, R]
        return Terms(gain=rows, scale_factor=self.scale_factor)
