"""Scalable softmax: scores grow with the logarithm of the number of keys."""

import math

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("ssmax")
class Ssmax(Encoding):
    """Scores of a query are multiplied by a trained factor and the log of its number of keys.

    Equation:
        w_ij = softmax_j(s * ln(n_i) * e_ij), where n_i is the number of real keys that query i may
        see, and s is trained for each head and layer.
    Shapes:
        s ``(H,)`` in each layer; it starts at 1 / mean(ln n) over the trained length, so that
        training begins as plain attention.
    Parameters:
        m * h
    Source:
        Nakanishi (2025), "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399, eq. 2.
    Differs:
        keys hidden by padding, windows or documents are not counted.
    """

    acts_on = "softmax"

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.factor = nn.Parameter(torch.empty(dims.num_heads))

    def reset_parameters(self) -> None:
        """Start as plain attention at the trained length, on average over its queries."""
        length = max(self.dims.trained_length, 2)
        mean = math.lgamma(length + 1) / length if self.dims.causal else math.log(length)
        nn.init.constant_(self.factor, 1 / mean)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Bring the factor; the keys are counted where the mask is known."""
        return Terms(log_visible=self.factor)
