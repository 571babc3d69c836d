"""The head that scores where an answer begins and ends."""

from torch import Tensor, nn
from torch.nn import functional as F


class SpanHead(nn.Module):
    """A linear layer with two outputs a token, as in BERT (Devlin et al., 2019, section 4.2)."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.scores = nn.Linear(embed_dim, 2)

    def forward(self, features: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Score each token as the first and as the last of an answer, in float32.

        Args:
            features: ``[B, T, C]``, of any precision.
            padding: ``[B, T]``, true where there is no token; the scores there are -inf.

        Returns:
            Two tensors ``[B, T]``.
        """
        weight, bias = self.scores.weight.float(), self.scores.bias.float()
        scores = F.linear(features.float(), weight, bias)  # [B, T, 2]
        scores = scores.masked_fill(padding.unsqueeze(-1), float("-inf"))
        return scores[..., 0], scores[..., 1]
