"""Attention of a decoder's layer to the output of an encoder."""

from torch import Tensor, nn

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore, Cache, make_projections
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.shared import Shared


class CrossAttention(AttentionCore, nn.Module):
    """Multi-head attention of a decoder's layer to the output of an encoder.

    With ``rope(cross_attention=true)`` queries are rotated by their positions in the target and
    keys by theirs in the source; otherwise positions take no part.

    Args:
        positions: of the decoder's stack; not a part of this module.
        source_dim: width of the encoder's output; by default that of the stack.
        dropout: probability of dropping a weight in training.
        bias: whether the projections have biases.
        layer: of the stack, from 0; for a spec whose layers differ.
        num_key_value_heads: as in :class:`SelfAttention`.

    Raises:
        UserError: a number of heads that does not divide H.
    """

    def __init__(
        self,
        positions: StackPositions,
        source_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer: int = 0,
        num_key_value_heads: int | None = None,
    ) -> None:
        super().__init__()
        dims, spec = positions.assembly.dims, positions.assembly.spec
        self.num_heads, self.head_dim, self.dropout = dims.num_heads, dims.head_dim, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = make_projections(
            dims, num_key_value_heads, bias, source_dim or dims.embed_dim
        )
        self.kind = spec.layer_kind(layer)
        self.rotates = spec.select_layers([layer]).rotates_source

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        shared: Shared,
        source_padding_mask: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to the source.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            source: output of the encoder, ``(batch, src_len, source_dim)``.
            shared: what the decoder's positions returned for this forward pass.
            source_padding_mask: True for padding, ``(batch, src_len)``.
            cache: of this layer and source, empty at the first step of a generation; filled.
            need_weights: also return the attention weights.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.

        Raises:
            UserError: keys are to be rotated, and the positions know of no source.
        """
        shared = shared.of_kind(self.kind)
        query = self.split_heads(self.q_proj(x))
        if self.rotates:
            if shared.source is None or shared.rotation is None:
                raise UserError(
                    "rope(cross_attention=true) rotates the source's keys: call "
                    "positions(embeddings, ..., source_length=source.size(1))"
                )
            query = shared.rotation.rotate_queries(query)
        if cache:
            key, value = cache["key"], cache["value"]
        else:
            key, value = (self.split_heads(p(source)) for p in (self.k_proj, self.v_proj))
            if self.rotates and shared.source is not None:
                key = shared.source.rotate_keys(key)
            if cache is not None:
                cache.update(key=key, value=value)
        mask = Mask(key_padding=source_padding_mask)
        dropout = self.dropout if self.training else 0.0
        key, value = self.repeat_heads(key), self.repeat_heads(value)
        attended, weights = attend(query, key, value, Terms(), mask, dropout, need_weights)
        return self.merge_heads(attended), weights
