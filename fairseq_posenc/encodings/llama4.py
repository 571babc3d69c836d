"""The temperature of Llama 4's layers without rotary positions."""

from torch import Tensor

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.temperature import Temperature


@register("llama4")
class Llama4(Temperature):
    """All scores of a query are multiplied by a factor that grows in steps of a fixed length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = 1 + beta * ln(1 + floor((i + 1) / L)), where i
        counts real tokens from 0.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Llama 4 (``attn_scale``, ``floor_scale`` of its configuration), on layers without rope:
        ``3*rope+chunk(size=8192),none+llama4``.
    Differs:
        positions are those of each sentence, so padding changes nothing.
    """

    def __init__(self, dims: Dims, *, beta: float = 0.1, length: int = 8192) -> None:
        super().__init__(dims)
        self.beta = beta
        self.length = length

    def factors(self, positions: Tensor) -> Tensor:
        """Compute the factors at positions ``(B or 1, T)``."""
        return 1 + self.beta * ((positions + 1) / self.length).floor().log1p()
