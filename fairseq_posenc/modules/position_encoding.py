"""Computes the scores of a single layer with a position encoding, to inspect or test it."""

import torch
from torch import Tensor

from fairseq_posenc import backends
from fairseq_posenc.assembly import build_layer, draft_terms
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.stack_positions import StackPositions, positions_from_padding
from fairseq_posenc.shared import compute_shared


class PositionEncoding(AttentionCore, StackPositions):
    """The position encoding of one layer and of its input, to inspect, test or compare it.

    It has no projections: callers pass queries, keys and values, ``(batch, heads, length,
    head_dim)``. Arguments and errors are those of :class:`StackPositions`.
    """

    def __init__(
        self,
        spec: str,
        embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        causal: bool = False,
        head_dim: int | None = None,
    ) -> None:
        super().__init__(spec, embed_dim, num_heads, max_positions, causal, head_dim)
        self.spec.check_length(1)  # one layer, not a list of different ones
        self.head_dim = self.dims.head_dim
        self.direction = "lr" if self.dims.causal else "both"
        self.layer = build_layer(self.spec, self.dims)

    @property
    def encodings(self) -> Encodings:  # type: ignore[override]
        """The layer's encodings, for `AttentionCore`; names of parameters begin with ``layer``."""
        return self.layer

    def parameter_counts(self) -> dict[str, int]:
        """Count each trained parameter, by names that begin with input, shared or layer."""
        return {name: parameter.numel() for name, parameter in self.named_parameters()}

    def embed(self, embeddings: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Add the input encoding to token embeddings ``(batch, length, embed_dim)``."""
        return self(embeddings, key_padding_mask)[0]  # `StackPositions.forward`: [1] is the state

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the scores before softmax, none masked; the mask counts keys for ``ssmax``.

        Args:
            query: projected queries of the last tokens, unscaled, ``(batch, heads, tgt_len,
                head_dim)``.
            key: projected keys of all tokens, ``(batch, heads, src_len, head_dim)``.
            key_padding_mask: True for padding, ``(batch, src_len)``; it never shifts a position.
            inputs: the layer's input, ``(batch, src_len, embed_dim)``, which forget gates read; by
                default zeros, so that a gate depends on its bias alone.

        Returns:
            ``(batch, heads, tgt_len, src_len)``, in float32 at least.
        """
        call = self._build_call(query, key, key, key_padding_mask, inputs)  # values are not read
        return reference.scores(call.query, call.key, call.terms, call.mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        direction: str | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the attended values ``(batch, heads, tgt_len, head_dim)``; see :meth:`scores`.

        Args:
            query: as for :meth:`scores`.
            key: as for :meth:`scores`.
            value: projected values of all tokens, shaped as ``key``.
            key_padding_mask: as for :meth:`scores`.
            direction: ``both``, ``lr`` (a query sees no later key) or ``rl`` (no earlier one); by
                default ``lr`` in a causal layer, else ``both``.
            dropout: probability of dropping a weight.
            backend: ``auto``, or the name of a backend.
            inputs: as for :meth:`scores`.
        """
        draft_terms(self.spec, self.dims, backend)  # for its error if a backend cannot do this
        if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
            raise UserError(f"value {tuple(value.shape)} must be as key, {tuple(key.shape)}")
        call = self._build_call(query, key, value, key_padding_mask, inputs, direction, dropout)
        attended, _ = backends.attend(call, backend)
        return attended

    @torch.no_grad()
    def distance_curve(self, reach: int, samples: int = 64, seed: int = 0) -> Tensor:
        """Compute the mean score by distance of a query and a key with the same content.

        Both are made from one random vector, to which the input encoding is added first.

        Args:
            reach: the largest distance.
            samples: number of random vectors, of norm sqrt(embed_dim), to average over.
            seed: random seed of the vectors.

        Returns:
            ``(heads, 2 * reach + 1)`` for distances ``-reach .. reach``.
        """
        dims = self.dims
        length = 2 * reach + 1
        if reach < 0:
            raise UserError(f"reach={reach}: the largest distance cannot be negative")
        if dims.heads_dim != dims.embed_dim:
            raise UserError(
                f"distance_curve splits vectors of width {dims.embed_dim} into heads, which do not "
                f"fit {dims.num_heads} heads of width {dims.head_dim}"
            )
        generator = torch.Generator().manual_seed(seed)
        content = torch.randn(samples, 1, dims.embed_dim, generator=generator)
        parameter = next(self.parameters(), content)  # without parameters: on the CPU
        # Drawn on the CPU, so that every device gets the same vectors.
        content = content.to(parameter.device)
        embedded = self.embed(content.expand(-1, length, -1))  # [samples, length, embed_dim]
        heads = embedded.unflatten(-1, (dims.num_heads, -1)).transpose(1, 2)  # [B, H, T, D]
        scores = self.scores(heads, heads, inputs=embedded)  # [B, H, T, T]
        return scores[:, :, reach].mean(0)  # of the middle query, which has all distances

    def _project_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows ``(R, C)`` into heads, for queries and for keys; other layers project them."""
        num_heads = self.dims.num_heads
        if rows.size(-1) != self.dims.heads_dim:
            raise UserError(
                f"rows of width {rows.size(-1)} cannot be split into {num_heads} heads of width "
                f"{self.head_dim} without a layer's projections: use a SelfAttention"
            )
        heads = rows.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        return heads, heads

    def _build_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        inputs: Tensor | None,
        direction: str | None = None,
        dropout: float = 0.0,
    ) -> AttentionCall:
        """Check the arguments, and make the call of a backend."""
        dims = self.dims
        batch, _, tgt_len, _ = query.shape
        src_len = key.size(2)
        query_shape = (batch, dims.num_heads, tgt_len, dims.head_dim)
        key_shape = (batch, dims.num_heads, src_len, dims.head_dim)
        if query.shape != query_shape or key.shape != key_shape or tgt_len > src_len:
            raise UserError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be (batch, "
                f"{dims.num_heads} heads, length, {dims.head_dim}), the queries of the last tokens"
            )
        positions = positions_from_padding(batch, src_len, tgt_len, key_padding_mask, query.device)
        shape = (batch, src_len, dims.embed_dim)
        inputs = query.new_zeros(shape) if inputs is None else inputs
        if inputs.shape != shape:
            raise UserError(f"inputs {tuple(inputs.shape)} must be {shape}")
        shared = compute_shared(self.shared, positions)[0]  # the spec has one layer
        mask = shared.mask.with_direction(direction or self.direction)
        return self.make_call(query, key, value, shared, inputs, mask=mask, dropout=dropout)
