"""DroPE's temperature, for models whose rotary positions were dropped after training."""

import math

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Signed, register
from fairseq_posenc.encodings.temperature import Temperature


@register("drope")
class Drope(Temperature):
    """All scores are multiplied by a factor that grows with the logarithm of the length.

    Equation:
        w_ij = softmax_j((1 + b ln(max(n / L, 1))) * e_ij), where n is the model's maximum
        number of positions, L the trained length, and b was fitted on held-out text.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Gelberg et al. (2025), "Extending the Context of Pretrained LLMs by Dropping Their
        Positional Embeddings", arXiv:2512.12167, appendix C.
    Differs:
        n is the model's limit, not the length of an input, so neither other sentences nor padding
        change a result, and decoding equals the full pass.
    """

    def __init__(self, dims: Dims, *, b: Signed = Signed(0.1)) -> None:  # noqa: B008  (immutable)
        super().__init__(dims)
        self.b = b

    def make_room(self, length: int) -> None:
        """Take the length as n."""
        self.dims = self.dims.with_room(length)

    def factors(self, positions: Tensor) -> Tensor:
        """Compute the factors, equal at all positions ``(B or 1, T)``, in float32."""
        growth = math.log(max(self.dims.max_positions / self.dims.trained_length, 1))
        return torch.full_like(positions, 1 + self.b * growth)
