"""Attention of one layer, with position encodings, and the core of all such modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.assembly import Shared
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.mask import DIRECTIONS, Mask
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import Positions, Span

# `key`, rotated, and `value`, (B, H, S, D) each; `decay`; `tokens`: how many came
Cache = dict[str, Any]


class SelfAttentionCore:
    """Projections, rotations and terms of self-attention, for modules of any library to mix in.

    Attributes:
        batch_first: whether inputs and outputs are ``(B, T, C)``, else ``(T, B, C)``.
        num_heads: H.
        head_dim: D.
        encodings: of the layer.
    """

    batch_first = True
    if TYPE_CHECKING:  # torch.jit evaluates the annotations of a class, and knows few types
        num_heads: int
        head_dim: int
        encodings: Encodings
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        out_proj: nn.Linear

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to rotated queries and keys, and values, each ``(B, H, T, D)``.

        Keys and values may be of fewer heads (see :meth:`repeat_heads`).
        """
        query, key, value = (
            self.split_heads(projection(x))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if (rotation := self.rotation(shared)) is not None:
            query, key = rotation.rotate_queries(query), rotation.rotate_keys(key)
        return query, key, value

    def rotation(self, shared: Shared) -> Rotation | None:
        """Select the rotation of the T tokens: the stack's, this layer's own, or None."""
        positions = shared.positions
        return shared.rotation or self.encodings.rotation(positions.queries(positions.places))

    def terms(self, span: Span, shared: Shared) -> Terms:
        """Combine the terms of the stack and of this layer, with their rows projected to heads."""
        terms = shared.terms | self.encodings.terms(span, shared.positions)

        def project(projection: nn.Module, rows: Tensor) -> Tensor:
            heads = projection(rows).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            return self.repeat_heads(heads, 0)  # [H, R, D]

        return terms.projected(
            lambda rows: project(self.q_proj, rows), lambda rows: project(self.k_proj, rows)
        )

    def repeat_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """Repeat the heads of keys or values, one for each group of queries' heads, to H."""
        groups = self.num_heads // x.size(dim)
        return x if groups == 1 else x.repeat_interleave(groups, dim)

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last dimension of ``(B, T, C)`` or ``(T, B, C)`` into heads."""
        heads = x.unflatten(-1, (-1, self.head_dim))
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
        direction: ``both``, ``lr`` or ``rl`` (see :class:`~fairseq_posenc.backends.mask.Mask`); by
            default ``lr`` in a causal stack, else ``both``.
        backend: ``auto``, or the name of one that must be used.
        bias: whether the projections have biases.
        layer: of the stack, from 0; for a spec whose layers differ.
        num_key_value_heads: heads of keys and values, each for as many heads of queries (grouped
            queries, Ainslie et al., 2023, arXiv:2305.13245); by default H.

    Raises:
        UserError: an unknown direction, a backend that cannot compute the encodings, or a number of
            heads that does not divide H.
    """

    def __init__(
        self,
        positions: StackPositions,
        dropout: float = 0.0,
        direction: Optional[str] = None,
        backend: str = "auto",
        bias: bool = True,
        layer: int = 0,
        num_key_value_heads: Optional[int] = None,
    ) -> None:
        super().__init__()
        dims = positions.assembly.dims
        positions.assembly.check(backend)
        self.num_heads, self.head_dim = dims.num_heads, dims.head_dim
        self.dropout, self.backend = dropout, backend
        self.direction = direction or ("lr" if dims.causal else "both")
        if self.direction not in DIRECTIONS or (dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = _projections(
            dims, num_key_value_heads, bias, dims.embed_dim
        )
        self.encodings = positions.assembly.build_layer(layer)
        self.kind = positions.assembly.spec.layer_kind(layer)

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
        positions = shared.positions
        query, key, value = self.project(x, shared)
        self._check_past(positions, x.size(1), cache)
        tgt_len, src_len = positions.tgt_len, positions.tokens.size(1)
        decay = self.encodings.decay(x, positions, (cache or {}).get("decay"))
        if cache is not None:
            needed = shared.locality.needed_keys()
            key, value = self._extend(cache, key, value, needed)
            if decay is not None:
                cache["decay"] = decay[..., -cache["key"].size(2) :]
        dropped = src_len - key.size(2)  # which no query sees
        terms = self.terms(Span.from_lengths(tgt_len, src_len, x.device), shared)
        mask = shared.mask(self.direction)
        attended, weights = attend(
            query,
            self.repeat_heads(key),
            self.repeat_heads(value),
            terms.without_first_keys(dropped).with_decay(decay, self.num_heads),
            mask.without_first_keys(dropped),
            self.dropout if self.training else 0.0,
            need_weights,
            self.backend,
        )
        return self.merge_heads(attended), weights

    @staticmethod
    def _extend(
        cache: Cache, key: Tensor, value: Tensor, needed: Optional[int]
    ) -> tuple[Tensor, Tensor]:
        """Join new keys and values to the cache's, which keeps those that later queries need."""
        tokens = cache.get("tokens", 0) + key.size(2)
        if cache:
            key = torch.cat([cache["key"], key], dim=2)  # [B, H, S, D]
            value = torch.cat([cache["value"], value], dim=2)
        first = 0 if needed is None else max(key.size(2) - needed, 0)
        # A part of a tensor would keep the whole in memory.
        kept = [x[:, :, first:].clone() if first else x for x in (key, value)]
        cache.update(key=kept[0], value=kept[1], tokens=tokens)
        return key, value

    @staticmethod
    def _check_past(positions: Positions, tgt_len: int, cache: Optional[Cache]) -> None:
        cached = cache["tokens"] if cache else 0
        past = positions.tokens.size(1) - positions.tgt_len
        if cached != past or tgt_len != positions.tgt_len:
            raise UserError(
                f"{cached} tokens are in the cache and {tgt_len} are new, but their positions were "
                f"made for past={past} and {positions.tgt_len} new: positions(embeddings, past=...)"
            )


class CrossAttention(SelfAttentionCore, nn.Module):
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
        source_dim: Optional[int] = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer: int = 0,
        num_key_value_heads: Optional[int] = None,
    ) -> None:
        super().__init__()
        dims, spec = positions.assembly.dims, positions.assembly.spec
        self.num_heads, self.head_dim, self.dropout = dims.num_heads, dims.head_dim, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = _projections(
            dims, num_key_value_heads, bias, source_dim or dims.embed_dim
        )
        self.kind = spec.layer_kind(layer)
        self.rotates = any(
            dict(item.options).get("cross_attention") for item in spec.layer_kinds[self.kind]
        )

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        shared: Shared,
        source_padding_mask: Optional[Tensor] = None,
        cache: Optional[Cache] = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend.

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


def _projections(
    dims: Dims, num_key_value_heads: Optional[int], bias: bool, source_dim: int
) -> Iterator[nn.Linear]:
    """Make the projections to queries, keys and values, and that of the output."""
    kv_heads = num_key_value_heads or dims.num_heads
    if kv_heads < 1 or dims.num_heads % kv_heads:
        raise UserError(
            f"num_key_value_heads={kv_heads} must divide the {dims.num_heads} heads of the queries"
        )
    kv_dim = kv_heads * dims.head_dim
    yield nn.Linear(dims.embed_dim, dims.heads_dim, bias)
    yield nn.Linear(source_dim, kv_dim, bias)
    yield nn.Linear(source_dim, kv_dim, bias)
    yield nn.Linear(dims.heads_dim, dims.embed_dim, bias)
