"""Polar coordinate positional embedding (PoPE).

B batch, H heads, T tokens, D head size; in formulas m layers, h heads, d head size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.errors import UserError
from fairseq_posenc.precision import at_least_fp32


class PolarRotation(NamedTuple):
    """A rotation to twice the width: a coordinate is a length, a position sets its angle.

    Attributes:
        angles: ``(B or 1, 1, T, D)`` in float32.
        offsets: subtracted from the angles of queries, ``(H, 1, D)``.
    """

    angles: Tensor
    offsets: Tensor

    def rotate_queries(self, query: Tensor) -> Tensor:
        """Lift queries ``(B, H, T, D)`` to ``(B, H, T, 2 D)``."""
        # Attention divides by the root of the lifted width, sqrt(2 d), and the paper by sqrt(d).
        return math.sqrt(2) * _lift(query, self.angles - self.offsets.to(self.angles.dtype))

    def rotate_keys(self, key: Tensor) -> Tensor:
        """Lift keys ``(B, H, T, D)`` to ``(B, H, T, 2 D)``."""
        return _lift(key, self.angles)


def _lift(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each coordinate into a point of the plane: its softplus is the length."""
    lengths = F.softplus(at_least_fp32(x))
    return torch.cat([lengths * angles.cos(), lengths * angles.sin()], -1).type_as(x)


@register("pope")
class Pope(Encoding):
    """Coordinates of queries and keys are lengths; positions alone set the angles between them.

    Equation:
        e_ij = sum_t s_it u_jt cos((j - i) base^(-t/d) + a_t) / sqrt(d), where s and u are the
        softplus of query and key, and t counts all d coordinates.
    Shapes:
        a ``(H, d)`` in each layer, the parameter ``delta``, clamped to [-2 pi, 0]; queries and keys
        become 2 d wide, values stay.
    Parameters:
        m * h * d
    Source:
        Gopalakrishnan et al. (2025), "PoPE", arXiv:2509.10534.
    Differs:
        nothing. a starts at 0.
    """

    acts_on = "rotation"
    takes_real_ids = True  # positions may be numbers such as 0.5
    zeros = ("delta",)  # parameters that start at 0
    widens = True  # queries and keys: specs with tables of their width are refused

    def __init__(self, dims: Dims, *, base: float = 10000.0) -> None:
        super().__init__(dims)
        if base <= 1:
            raise UserError(f"pope(base={base:g}): the base must be more than 1")
        self.base = base
        self.delta = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))

    def rotation(self, ids: Tensor) -> PolarRotation:
        """Compute the angles at positions ``ids``, ``(B or 1, T)``, in float32."""
        width = self.dims.head_dim
        exponents = torch.arange(width, dtype=torch.float32, device=ids.device) / width
        angles = ids[:, None, :, None] * self.base**-exponents  # [B or 1, 1, T, D]
        return PolarRotation(angles, self.delta.clamp(-2 * math.pi, 0)[:, None])  # [H, 1, D]
