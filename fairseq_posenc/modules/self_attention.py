"""Self-attention of one layer, with position encodings, and the core of all such modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.assembly import Shared
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import DIRECTIONS
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import Positions, Span

Cache = dict[str, Tensor]  # keys, rotated, and values of earlier steps


class SelfAttentionCore:
    """Projections, rotations and terms of self-attention, for modules of any library to mix in.

    Attributes:
        batch_first: whether inputs and outputs are ``(B, T, C)``, else ``(T, B, C)``.
        num_heads: H.
        encodings: of the layer.
    """

    batch_first = True
    if TYPE_CHECKING:  # torch.jit evaluates the annotations of a class, and knows few types
        num_heads: int
        encodings: Encodings
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        out_proj: nn.Linear

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to rotated queries and keys, and values, each ``(B, H, T, D)``."""
        query, key, value = (
            self.split_heads(projection(x))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return (*shared.rotate(query, key), value)

    def terms(self, span: Span, shared: Shared) -> Terms:
        """Combine the terms of the stack and of this layer, with their rows projected to heads."""
        terms = shared.terms | self.encodings.terms(span, shared.positions)

        def project(projection: nn.Module, rows: Tensor) -> Tensor:
            return projection(rows).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # [H, R, D]

        return terms.projected(
            lambda rows: project(self.q_proj, rows), lambda rows: project(self.k_proj, rows)
        )

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last dimension of ``(B, T, C)`` or ``(T, B, C)`` into heads."""
        heads = x.unflatten(-1, (self.num_heads, -1))
        return heads.permute((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3))  # [B, H, T, D]

    def merge_heads(self, attended: Tensor) -> Tensor:
        """Merge the heads of ``(B, H, T, D)``, and project them to the layer's output."""
        merged = attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2)
        output: Tensor = self.out_proj(merged)  # [B, T, C]
        return output


class SelfAttention(SelfAttentionCore, nn.Module):
    """Multi-head self-attention of one layer, with position encodings.

    Parameters have the names of fairseq's, so that weights can be carried over.

    Args:
        positions: of the stack that the layer is in; not a part of this module.
        dropout: probability of dropping a weight in training.
        direction: ``both``, ``lr`` or ``rl`` (see :class:`~fairseq_posenc.backends.base.Mask`); by
            default ``lr`` in a causal stack, else ``both``.
        backend: ``auto``, or the name of one that must be used.
        bias: whether the projections have biases.
        layer: of the stack, from 0; for a spec whose layers differ.

    Raises:
        UserError: an unknown direction, or a backend that cannot compute the encodings.
    """

    def __init__(
        self,
        positions: StackPositions,
        dropout: float = 0.0,
        direction: Optional[str] = None,
        backend: str = "auto",
        bias: bool = True,
        layer: int = 0,
    ) -> None:
        super().__init__()
        dims = positions.assembly.dims
        positions.assembly.check(backend)
        self.num_heads, self.dropout, self.backend = dims.num_heads, dropout, backend
        self.direction = direction or ("lr" if dims.causal else "both")
        if self.direction not in DIRECTIONS or (dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        width = dims.embed_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, bias) for _ in range(4)
        )
        self.encodings = positions.assembly.build_layer(layer)
        self.kind = positions.assembly.spec.kind(layer)

    def forward(
        self, x: Tensor, shared: Shared, cache: Optional[Cache] = None, need_weights: bool = False
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            shared: what the stack's positions returned for this forward pass.
            cache: of this layer, empty at the first step of a generation; filled. The stack's
                positions must have been given its length as ``past``.
            need_weights: also return the attention weights, which only the reference computes.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.

        Raises:
            UserError: the positions are of other tokens than those in the cache and ``x``.
        """
        shared = shared.of_kind(self.kind)
        query, key, value = self.project(x, shared)
        self._check_past(shared.positions, x.size(1), cache)
        if cache is not None:
            if cache:
                key = torch.cat([cache["key"], key], dim=2)  # [B, H, S, D]
                value = torch.cat([cache["value"], value], dim=2)
            cache.update(key=key, value=value)
        terms = self.terms(Span.from_lengths(query.size(2), key.size(2), x.device), shared)
        mask = shared.mask(self.direction)
        dropout = self.dropout if self.training else 0.0
        attended, weights = attend(
            query, key, value, terms, mask, dropout, need_weights, self.backend
        )
        return self.merge_heads(attended), weights

    @staticmethod
    def _check_past(positions: Positions, tgt_len: int, cache: Optional[Cache]) -> None:
        cached = cache["key"].size(2) if cache else 0
        past = positions.tokens.size(1) - positions.tgt_len
        if cached != past or tgt_len != positions.tgt_len:
            raise UserError(
                f"{cached} tokens are in the cache and {tgt_len} are new, but their positions were "
                f"made for past={past} and {positions.tgt_len} new: positions(embeddings, past=...)"
            )
