"""Self-attention of one layer, with position encodings."""

from typing import Any

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
from fairseq_posenc.modules.stack_positions import StackPositions
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
        self,
        x: Tensor,
        shared: Shared,
        cache: Cache | dict[str, Any] | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to all.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            shared: what the stack's positions returned for this forward pass.
            cache: of this layer, empty at the first step of a generation; filled. The stack's
                positions must have been given its length as ``past``. A dictionary is the state
                of one.
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
        cache = Cache.wrap(cache)
        query, key, value = self.project(x)
        self._check_cache(shared, value, Cache() if cache is None else cache)
        dropout = self.dropout if self.training else 0.0
        call = self.make_call(
            query, key, value, shared, x, cache, dropout=dropout, need_weights=need_weights
        )
        attended, weights = attend(*call, requested=self.backend)
        return self.merge_heads(attended), weights

    @staticmethod
    def _check_cache(shared: Shared, value: Tensor, cache: Cache) -> None:
        """Refuse a cache of another layer, batch or number of tokens.

        Args:
            shared: of this kind of layer.
            value: of the new tokens, ``(B, H, T, D)``.
            cache: as it was given.
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
        needed = shared.locality.needed_keys()
        batch, heads, length = cache.state["key"].shape[:3]  # the width may be that of its rotation
        width = cache.state["value"].size(3)
        expected = (value.size(0), value.size(1), past if needed is None else min(past, needed))
        if (batch, heads, length, width) != (*expected, value.size(3)):
            raise UserError(
                f"the cache has a batch size of {batch} and {length} keys of {heads} heads of "
                f"width {width}, but this layer and the positions need {expected[0]}, "
                f"{expected[2]}, {expected[1]} and {value.size(3)}: give each layer its own cache"
            )
