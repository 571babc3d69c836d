"""Scores that grow with the logarithm of the position beyond the trained length."""

import math
from typing import Optional

from torch import Tensor

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.temperature import Temperature


@register("logn")
class Logn(Temperature):
    """All scores of a query are multiplied by log(i + 1) / log(L) beyond the trained length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = max(1, ln(i + 1) / ln L), where i counts real tokens
        from 0 and L is the trained length.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Su (2021), "From the invariance of entropy to the scale of attention",
        kexue.fm/archives/8823; the first Qwen models, ``use_logn_attn``.
    Differs:
        positions are those of each sentence, so padding changes nothing. ``length`` is by default
        the length that the weights were trained at.
    """

    def __init__(self, dims: Dims, *, length: Optional[int] = None) -> None:
        super().__init__(dims)
        self.length = length

    def factors(self, positions: Tensor) -> Tensor:
        """Compute the factors at positions ``(B or 1, T)``."""
        length = max(self.length or self.dims.trained_length, 2)  # ln 1 is 0
        return ((positions + 1).log() / math.log(length)).clamp(min=1.0)
