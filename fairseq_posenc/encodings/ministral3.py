"""The temperature of Ministral 3."""

from typing import Optional

from torch import Tensor

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.temperature import Temperature


@register("ministral3")
class Ministral3(Temperature):
    """All scores of a query are multiplied by a factor that grows with multiples of a length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = 1 + beta * ln(1 + floor(i / L)), where i counts real
        tokens from 0 and L is the trained length.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Ministral 3 (``llama_4_scaling_beta``, ``original_max_position_embeddings``).
    Differs:
        positions are those of each sentence, so padding changes nothing. ``length`` is by default
        the length that the weights were trained at.
    """

    def __init__(self, dims: Dims, *, beta: float = 0.1, length: Optional[int] = None) -> None:
        super().__init__(dims)
        self.beta = beta
        self.length = length

    def factors(self, positions: Tensor) -> Tensor:
        """Compute the factors at positions ``(B or 1, T)``."""
        length = self.length or self.dims.trained_length
        return 1 + self.beta * (positions / length).floor().log1p()
