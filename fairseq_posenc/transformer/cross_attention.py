"""Encoder-decoder attention with rotary positions, for ``rope(cross_attention=true)``."""

from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.attention import IncrementalState
from fairseq_posenc.transformer.forward_context import current_context


class RotaryCrossAttention(MultiheadAttention):
    """fairseq's encoder-decoder attention, whose queries and keys are rotated by their positions.

    Queries stand at their position in the target, keys at theirs in the source; both rotations are
    those of the forward pass. fairseq's forward is unchanged, with its caches and beams: only the
    projections of queries and keys are replaced, and rotate their output. Keys are cached rotated.

    Args:
        embed_dim: C.
        num_heads: H.
        **kwargs: fairseq's own.

    Raises:
        UserError: quantisation noise (``q_noise``).
    """

    def __init__(self, embed_dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dim, num_heads, encoder_decoder_attention=True, **kwargs)
        if kwargs.get("q_noise", 0.0) > 0:
            raise UserError(
                "rope(cross_attention=true) does not work with --quant-noise-pq: quantised "
                "projections would not rotate"
            )
        for name, is_key in (("q_proj", False), ("k_proj", True)):
            setattr(self, name, RotatedProjection(getattr(self, name), self.head_dim, is_key))

    def forward(
        self,
        *args: Any,
        incremental_state: IncrementalState = None,
        static_kv: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq's class does: ``(T, B, C)`` in and out.

        Args:
            *args: fairseq's own.
            incremental_state: fairseq's caches.
            static_kv: the keys are the same at every step, as always in fairseq's decoders.
            **kwargs: fairseq's own.

        Raises:
            UserError: neither ``static_kv`` nor caches.
        """
        if not static_kv and incremental_state is None:
            # fairseq would then use torch's function, which takes weights and calls no projection.
            raise UserError("rotary encoder-decoder attention must be called with static_kv=True")
        kwargs.update(incremental_state=incremental_state, static_kv=static_kv)
        attended: tuple[Tensor, Tensor | None] = super().forward(*args, **kwargs)
        return attended


class RotatedProjection(nn.Linear):
    """Projects to queries or keys, and rotates them by the current position state.

    Args:
        plain: the projection whose parameters it takes over; heads may be pruned.
        head_dim: D.
        is_key: whether it projects the source's keys, else the target's queries.
    """

    def __init__(self, plain: nn.Linear, head_dim: int, is_key: bool) -> None:
        # On "meta" no numbers are drawn; the parameters are replaced below.
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.head_dim = head_dim
        self.is_key = is_key

    def forward(self, x: Tensor) -> Tensor:
        """Project ``(T, B, C)`` and rotate each head."""
        projected = super().forward(x)  # [T, B, C]
        heads = projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)  # [B, H, T, D]
        return self._rotate(heads).permute(2, 0, 1, 3).reshape(projected.shape)  # [T, B, C]

    def _rotate(self, heads: Tensor) -> Tensor:
        """Rotate heads ``(B, H, T, D)``."""
        shared = current_context()
        rotation = None if shared is None else shared.source if self.is_key else shared.rotation
        if rotation is None:
            raise UserError("rotary encoder-decoder attention works only inside a decoder")
        assert isinstance(rotation, PairRotation), "of rope"
        # fairseq projects one key for all beams of a sentence.
        rotation = rotation.select_sentences(heads.size(0))
        return rotation.rotate_keys(heads) if self.is_key else rotation.rotate_queries(heads)
