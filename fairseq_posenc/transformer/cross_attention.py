"""Rotates queries and keys of fairseq's encoder-decoder attention (``rope(cross_attention=true)``).

T tokens of target or source, B batch, C width of the model, H heads, D head size.
"""

from typing import Any

from torch import Tensor, nn

from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.transformer.forward_context import current_layer


def rotate_projections(attention: Any) -> None:
    """Let fairseq's encoder-decoder attention rotate queries and keys by their positions.

    Queries are rotated by their positions in the target, keys by theirs in the source; keys are
    cached rotated. Only the projections of queries and keys are replaced, by ones that rotate their
    output, so fairseq's forward, caches and beam search stay as they are.
    """
    for name, is_key in {"q_proj": False, "k_proj": True}.items():
        plain = getattr(attention, name)
        setattr(attention, name, RotatedProjection(plain, attention.head_dim, is_key))
    # Else fairseq would call torch's function, which reads the projections' weights and does not
    # call them.
    attention.skip_embed_dim_check = True


class RotatedProjection(nn.Linear):
    """Projects to queries or keys, and rotates them by the current position state.

    Args:
        plain: the projection whose parameters it takes over, under the same names.
        head_dim: D, the width of a head.
        is_key: whether it projects to the source's keys; else to the target's queries.
    """

    def __init__(self, plain: nn.Linear, head_dim: int, is_key: bool) -> None:
        # On "meta" nothing is initialised; the parameters are replaced below.
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.head_dim = head_dim
        self.is_key = is_key

    def forward(self, x: Tensor) -> Tensor:
        """Project ``(T, B, C)`` and rotate each head."""
        shared = current_layer()
        rotation = shared.source_rotation if self.is_key else shared.rotation
        assert isinstance(rotation, PairRotation), "only rope has cross_attention"
        projected = super().forward(x)  # [T, B, C]
        heads = projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)  # [B, H, T, D]
        # fairseq projects the source's keys once per sentence, not once per beam.
        rotation = rotation.select_sentences(heads.size(0))
        heads = rotation.rotate_keys(heads) if self.is_key else rotation.rotate_queries(heads)
        return heads.permute(2, 0, 1, 3).reshape(projected.shape)  # [T, B, C]
