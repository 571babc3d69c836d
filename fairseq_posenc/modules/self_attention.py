"""Self-attention of one layer, with position encodings."""

import torch
from torch import Tensor, nn

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.mask import DIRECTIONS
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import (
    AttentionCore,
    Cache,
    check_dropout,
    make_projections,
)
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import Span
from fairseq_posenc.shared import Shared


class SelfAttention(AttentionCore, nn.Module):
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
        direction: str | None = None,
        backend: str = "auto",
        bias: bool = True,
        layer: int = 0,
        num_key_value_heads: int | None = None,
    ) -> None:
        super().__init__()
        dims = positions.assembly.dims
        positions.assembly.check(backend)
        self.num_heads, self.head_dim = dims.num_heads, dims.head_dim
        self.dropout, self.backend = check_dropout(dropout), backend
        self.stack = positions.assembly
        self.direction = direction or ("lr" if dims.causal else "both")
        if self.direction not in DIRECTIONS or (dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = make_projections(
            dims, num_key_value_heads, bias, dims.embed_dim
        )
        self.encodings = positions.assembly.build_layer(layer)
        self.kind = positions.assembly.spec.layer_kind(layer)

    def forward(
        self, x: Tensor, shared: Shared, cache: Cache | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to all.

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
            UserError: the positions are of another stack or batch, or of other tokens than those in
                the cache and ``x``.
        """
        shared.check_stack(self.stack)
        shared.check_input(x)
        shared = shared.of_kind(self.kind)
        positions = shared.positions
        query, key, value = self.project(x, shared)
        tgt_len, src_len = positions.tgt_len, positions.tokens.size(1)
        decay = self.encodings.decay(x, positions, (cache or {}).get("decay"))
        self._check_cache(shared, key, decay, {} if cache is None else cache)
        if cache is not None:
            needed = shared.locality.needed_keys()
            key, value = self._extend(cache, key, value, needed)
            if decay is not None:
                cache["decay"] = decay[:, :, -cache["key"].size(2) :]
        dropped = src_len - key.size(2)  # no query sees them
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
        cache: Cache, key: Tensor, value: Tensor, needed: int | None
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to the cache, which keeps what later queries need."""
        tokens = cache.get("tokens", 0) + key.size(2)
        if cache:
            key = torch.cat([cache["key"], key], dim=2)  # [B, H, S, D]
            value = torch.cat([cache["value"], value], dim=2)
        first = 0 if needed is None else max(key.size(2) - needed, 0)
        # A part of a tensor would keep the whole in memory.
        kept = [x[:, :, first:].clone() if first else x for x in (key, value)]
        cache.update(key=kept[0], value=kept[1], tokens=tokens)
        return key, value

    def _check_cache(self, shared: Shared, key: Tensor, decay: Tensor | None, cache: Cache) -> None:
        """Refuse a cache of another layer, batch or number of tokens.

        Args:
            shared: of this kind of layer.
            key: of the new tokens, ``(B, H, T, D)``.
            decay: of all tokens that the cache and the call have; None where there are no gates.
            cache: as it was given.
        """
        past = shared.positions.tokens.size(1) - shared.positions.tgt_len
        if cache and "tokens" not in cache:
            raise UserError("the cache is not of a SelfAttention")
        if cache.get("tokens", 0) != past:
            raise UserError(
                f"{cache.get('tokens', 0)} tokens are in the cache and {key.size(2)} are new, but "
                f"their positions were made for past={past} and {key.size(2)} new: "
                "positions(embeddings, past=...)"
            )
        if not cache:
            return
        needed, kept = shared.locality.needed_keys(), cache["key"]
        batch, heads, length, width = kept.shape
        expected = (key.size(0), key.size(1), past if needed is None else min(past, needed))
        if (batch, heads, length, width) != (*expected, key.size(3)):
            raise UserError(
                f"the cache has a batch size of {batch} and {length} keys of {heads} heads of "
                f"width {width}, but this layer and the positions need {expected[0]}, "
                f"{expected[2]}, {expected[1]} and {key.size(3)}: give each layer its own cache"
            )
        if ("decay" in cache) != (decay is not None):
            raise UserError("the cache is of a layer with other encodings: give each its own")
