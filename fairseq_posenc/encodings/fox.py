"""Forgetting attention (FoX): each token's gate says how much of the earlier tokens to keep."""

from typing import cast

from torch import Tensor, nn

from fairseq_posenc.encodings.base import INIT_STD, Dims, Encoding, register
from fairseq_posenc.encodings.term import Cost


@register("fox")
class Fox(Encoding):
    """The forget gates of the tokens between key and query lower the score.

    Equation:
        e_ij = q_i.k_j / sqrt(d) + sum_t log(f_t), where t runs from j + 1 to i,
        f_t = sigmoid(w_h.x_t + b_h), and x is the input of the layer.
    Shapes:
        w ``(H, C)`` and b ``(H,)`` in each layer. An encoder has a second set for later
        keys, where t runs from i + 1 to j.
    Parameters:
        2 * m * h * (C + 1); half of it in a causal model
    Source:
        Lin et al. (2025), "Forgetting Transformer", arXiv:2503.02130, section 3.
    Differs:
        the paper is about causal models. b starts at ``start``. Padding does not forget, and
        logarithms are rounded to multiples of 2^-32, whose sums are exact.
    """

    acts_on = "scores"
    takes_ids = "unread"
    cost = Cost("2 h n C + 2 h n^2", "h n^2")

    def __init__(self, dims: Dims, *, start: float = 5.0) -> None:
        super().__init__(dims)
        self.start = start
        self.gate = nn.Linear(dims.embed_dim, dims.num_heads * (1 if dims.causal else 2))

    def reset_parameters(self) -> None:
        """Begin with gates that forget nearly nothing."""
        nn.init.normal_(self.gate.weight, std=INIT_STD)
        nn.init.constant_(self.gate.bias, self.start)

    def forget_gates(self, x: Tensor) -> Tensor:
        """Project the layer's input to logits of gates, ``(B, T, H or 2 H)``."""
        return cast("Tensor", self.gate(x))
