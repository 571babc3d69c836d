"""Rotary position embedding with exponential decay (xPos)."""

import math
from typing import Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.positions import syncs

GAMMA = 0.4  # g


@register("xpos")
class XPos(Rope):
    """As ``rope``, but scores decay with the distance, faster in pairs that turn faster.

    Equation:
        e_ij = (z^(i/w) R_i q_i).(z^(-j/w) R_j k_j) / sqrt(c d), where pair t of coordinates has
        z = (2t/d + g) / (1 + g), below 1: the score decays with i - j.
    Shapes:
        rotates query and key ``(B, H, T, D)``; one rotation for all layers.
    Parameters:
        0
    Source:
        Sun et al. (2022), "A Length-Extrapolatable Transformer", arXiv:2212.10554; g = 0.4 and
        w = ``scale_base`` = 512 as in the authors' code.
    Differs:
        for causal models only, as in the paper: a later key would be amplified. Exponents count
        from half of the trained length, to suit fp16; scores do not change.
    """

    causal_only = "it would amplify keys after the query"

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
        scale_base: float = 512.0,
    ) -> None:
        super().__init__(dims, base=base, fraction=fraction, layout=layout, scaling=scaling)
        self.scale_base = scale_base

    def rotation(self, ids: Tensor) -> PairRotation:
        """Compute the rotation, and its decay, at positions ``ids``, ``(B or 1, T)``."""
        bits = self._count_bits(ids)
        return super().rotation(ids)._replace(decay=self.decay(ids), decay_bits=bits)

    def _count_bits(self, ids: Tensor) -> float:
        """Count the powers of 2 of the largest factor; 0 where ids are not known."""
        if torch.compiler.is_compiling() or ids.is_meta or not ids.numel():
            return 0.0
        # A GPU is not waited for: without padding, ids of a full pass are those of its tokens.
        middle, gpu = self.dims.trained_length // 2, syncs(ids.device)
        first, last = (0, ids.size(1) - 1) if gpu else torch.stack(ids.aminmax()).tolist()
        if gpu and ids.size(1) == 1:
            return 0.0
        return max(middle - first, last - middle) / self.scale_base * math.log2((1 + GAMMA) / GAMMA)

    def decay(self, ids: Tensor) -> Tensor:
        """Compute the factor of each coordinate of a query, ``(B or 1, 1, T, D)``."""
        pairs = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=ids.device)
        base = (pairs / self.rotated + GAMMA) / (1 + GAMMA)
        steps = ids[..., None] - self.dims.trained_length // 2  # [B or 1, T, 1]
        scale = base ** (steps.float() / self.scale_base)  # [B or 1, T, rotated/2]
        if self.layout == "half":
            scale = torch.cat([scale, scale], dim=-1)
        else:
            scale = scale.repeat_interleave(2, dim=-1)
        rest = scale.new_ones(*scale.shape[:-1], self.dims.head_dim - self.rotated)
        return torch.cat([scale, rest], dim=-1).unsqueeze(1)  # [B or 1, 1, T, D]
