"""Computes self-attention of one layer with position encodings."""

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.mask import DIRECTIONS
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import (
    AttentionCore,
    check_dropout,
    make_projections,
)
from fairseq_posenc.modules.cache import Cache
from fairseq_posenc.modules.stack_positions import (
    StackPositions,
    check_layer_input,
    check_shared,
    read_assembly,
)
from fairseq_posenc.shared import Shared


class SelfAttention(AttentionCore, nn.Module):
    """Multi-head self-attention of one layer, with position encodings.

    Parameters have the same names as fairseq's, so weights can be copied from its models.

    Args:
        positions: positions of the layer's stack; they do not become a part of this module.
        dropout: probability of dropping a weight in training.
        direction: ``both``, ``lr`` or ``rl`` (see :class:`~fairseq_posenc.backends.mask.Mask`); by
            default ``lr`` in a causal stack, else ``both``.
        backend: ``auto``, or the name of the backend that must be used.
        bias: whether the projections have biases.
        layer: index of the layer in the stack, from 0; matters if the spec's layers differ.
        num_key_value_heads: number of heads of keys and values, which groups of query heads share
            (grouped-query attention, Ainslie et al., 2023, arXiv:2305.13245); by default H.

    Raises:
        UserError: the direction is unknown, the backend cannot compute the encodings, or
            ``num_key_value_heads`` does not divide H.
    """

    def __init__(
        self,
        positions: StackPositions,
        dropout: float = 0.0,
        direction: str | None = None,
        backend: str = "auto",
        bias: bool = True,
        layer: int = 0,
        num_key_value_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.stack = read_assembly(positions, layer)
        dims = self.stack.dims
        self.stack.check(backend)
        self.num_heads, self.head_dim = dims.num_heads, dims.head_dim
        self.dropout, self.backend = check_dropout(dropout), backend
        self.direction = direction or ("lr" if dims.causal else "both")
        if self.direction not in DIRECTIONS or (dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = make_projections(
            dims, num_key_value_heads, bias, dims.embed_dim
        )
        self.encodings = self.stack.build_layer(layer)
        self.kind = self.stack.spec.layer_kind(layer)

    def forward(
        self,
        x: Tensor,
        shared: Shared,
        cache: Cache | dict[str, Any] | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to all tokens.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            shared: second result of the stack's positions in this forward pass.
            cache: this layer's cache or its state, a dictionary; pass it empty in the first step of
                decoding, and the number of tokens in it as ``past`` to the stack's positions.
            need_weights: also return the attention weights, which only the reference backend
                computes.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.

        Raises:
            UserError: ``shared`` belongs to another stack or batch, or to other tokens than those
                in the cache and in ``x``.
        """
        check_shared(shared, self.stack)
        check_layer_input(x, shared, self.stack)
        shared = shared.of_kind(self.kind)
        cache = Cache.wrap(cache)
        query, key, value = self.project(x)
        self._check_cache(shared, value, Cache() if cache is None else cache)
        dropout = self.dropout if self.training else 0.0
        call = self.make_call(
            query, key, value, shared, x, cache, dropout=dropout, need_weights=need_weights
        )
        if cache is not None and not shared.positions.counted:
            # A later step joins its ids to these; a row for each beam, which it may reorder.
            ids = shared.positions.ids
            cache.state["ids"] = ids.expand(x.size(0), *ids.shape[1:])
        attended, weights = attend(*call, requested=self.backend)
        return self.merge_heads(attended), weights

    @staticmethod
    def _check_cache(shared: Shared, value: Tensor, cache: Cache) -> None:
        """Refuse a cache of another layer, batch or number of tokens.

        Args:
            shared: position state for this kind of layer.
            value: values of the new tokens, ``(B, H, T, D)``.
            cache: the cache of earlier tokens.
        """
        past = shared.positions.tokens.size(1) - shared.positions.tgt_len
        if cache and "tokens" not in cache.state:
            raise UserError("the cache is not of a SelfAttention")
        if cache.tokens != past:
            raise UserError(
                f"{cache.tokens} tokens are in the cache and {value.size(2)} are new, but their "
                f"positions were made for past={past} and {value.size(2)} new: "
                "positions(embeddings, past=...)"
            )
        if not cache:
            return
        if cache.ids is not None and shared.positions.counted:
            raise UserError("the tokens in the cache had position_ids: give those of the new ones")
        needed = shared.locality.needed_keys(past)
        batch, heads, length = cache.state["key"].shape[:3]  # rotated keys may be wider than values
        width = cache.state["value"].size(3)
        expected = past if needed.last is None else min(past, needed.last)
        if needed.first is not None:
            # More keys are right: after beams were reordered, first keys that no row needs now.
            lacking = ~torch.isin(needed.first, cache.list_places())
            expected = max(expected, length + int(lacking.sum()))
        needed_batch, needed_heads, _, needed_width = value.shape
        if (batch, heads, width) != (needed_batch, needed_heads, needed_width) or (
            length != expected
        ):
            raise UserError(
                f"the cache has a batch size of {batch} and {length} keys of {heads} heads of "
                f"width {width}, but this layer and the positions need {needed_batch}, {expected}, "
                f"{needed_heads} and {needed_width}: give each layer its own cache"
            )
