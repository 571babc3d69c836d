"""Sinusoidal absolute positions.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions


@register("sinusoidal")
class Sinusoidal(Encoding):
    """Sines and cosines of the position are added to the token embeddings.

    Equation:
        x_i = w_i + s p_i, where p_i[2t] = sin(i / 10000^(2t/C)) and
        p_i[2t+1] = cos(i / 10000^(2t/C)); s is the option ``scale``.
    Shapes:
        adds ``(B or 1, T, C)``.
    Parameters:
        0
    Source:
        Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, section 3.5.
    Differs:
        nothing with ``layout=interleaved`` and ``scale=1``. ``layout=half``, as in Marian: all
        sines, then all cosines. ``layout=fairseq``, for checkpoints of fairseq's own models: the
        same with frequencies 10000^(-t/(C/2 - 1)), and positions counted from padding_idx + 1.
        On several ``axes``, each has an equal part of the width, as in MAE (arXiv:2111.06377).
        ``scale=0.03`` is for masked LMs, whose token embeddings start with a standard deviation of
        0.02: sinusoids of 0.7 drown them.
    """

    acts_on = "input"
    takes_ids = "real"
    cost = Cost("n C", "n C")

    def __init__(
        self,
        dims: Dims,
        *,
        layout: Literal["interleaved", "half", "fairseq"] = "interleaved",
        scale: float = 1.0,
        axes: int = 1,
    ) -> None:
        super().__init__(dims)
        if dims.embed_dim % (2 * axes):
            needed = "an even width" if axes == 1 else f"a multiple of {2 * axes} as width"
            raise UserError(f"sinusoidal needs {needed}, not {dims.embed_dim}")
        self.axes = axes
        self.layout = layout
        self.scale = scale

    def embed(self, positions: Positions) -> Tensor:
        """Compute the vectors of the queries' positions in float32, ``(B or 1, T, C)``."""
        ids = positions.query_places
        first_id = positions.rows.padding_idx + 1 if self.layout == "fairseq" else 0
        count_from_0 = positions.counted and positions.drawn is None
        if count_from_0 and ids.size(0) > 1 and ids.size(1) > 1:
            # Vectors are computed once for all sentences, which repeat the same positions.
            table = self.vectors(torch.arange(positions.longest, device=ids.device) + first_id)
            return F.embedding(ids, self.scale * table)
        return self.scale * self.vectors(ids + first_id)

    def vectors(self, ids: Tensor) -> Tensor:
        """Compute p at positions ``ids``, ``(B or 1, T)``, in float32: ``(B or 1, T, C)``.

        On several axes, ids are ``(B or 1, T, axes)``. Distances ``(R,)`` give ``(R, C)``.
        """
        if ids.dim() == 3:
            return torch.cat([self._axis_vectors(x) for x in ids.unbind(-1)], -1)
        return torch.cat([self._axis_vectors(ids)] * self.axes, -1)  # a token's id is for all axes

    def _axis_vectors(self, ids: Tensor) -> Tensor:
        """Compute the part of an axis, ``(*ids.shape, P)`` where P = C / axes."""
        half = self.dims.embed_dim // (2 * self.axes)
        steps = half - 1 if self.layout == "fairseq" else half
        exponents = torch.arange(half, dtype=torch.float32, device=ids.device) / max(steps, 1)
        # In float32 in every model: half precision would round large angles.
        frequencies = torch.exp(exponents * -math.log(10000.0))
        angles = ids.float().unsqueeze(-1) * frequencies  # [..., P/2]
        if self.layout != "interleaved":
            return torch.cat([angles.sin(), angles.cos()], dim=-1)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)  # [..., P]
