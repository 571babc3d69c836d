"""Computes the attention of a layer: to the tokens of its stack, or to an encoder's output.

B batch, T new tokens, S all tokens, H heads, D head size; layers with equal encodings are a *kind*.
"""

from functools import partial
from typing import cast

from torch import Tensor, nn

from fairseq_posenc.assembly import build_layer, draft_layer
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import AttentionCall, check_dropout
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import DIRECTIONS, Mask
from fairseq_posenc.modules import input_checks
from fairseq_posenc.modules.attention_core import Cache, Kept, append_to_kept, use_kept
from fairseq_posenc.modules.stack_positions import StackLayer, StackPositions
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import Shared


class _LayerAttention(StackLayer):
    """Base of both classes: projections, which ``project`` and ``project_output`` apply."""

    def __init__(
        self,
        positions: StackPositions,
        dropout: float,
        bias: bool,
        layer: int,
        num_key_value_heads: int | None,
        source_dim: int | None = None,
    ) -> None:
        super().__init__(positions, layer)  # sets `spec`, `dims`, `head_dim` and `kind`
        self.dropout = check_dropout(dropout)
        dims = self.dims
        kv_heads = dims.num_heads if num_key_value_heads is None else num_key_value_heads
        if kv_heads < 1 or dims.num_heads % kv_heads:
            raise UserError(f"num_key_value_heads={kv_heads} must divide {dims.num_heads} heads")
        self.num_key_value_heads = kv_heads
        kv_dim = kv_heads * dims.head_dim
        source_dim = dims.embed_dim if source_dim is None else source_dim
        self.q_proj = nn.Linear(dims.embed_dim, dims.all_heads_dim, bias)
        self.k_proj = nn.Linear(source_dim, kv_dim, bias)
        self.v_proj = nn.Linear(source_dim, kv_dim, bias)
        self.out_proj = nn.Linear(dims.all_heads_dim, dims.embed_dim, bias)


class SelfAttention(_LayerAttention):
    """Multi-head self-attention of one layer, with position encodings.

    Parameters have the same names as fairseq's, so weights can be copied from its models.

    Args:
        positions: positions of the layer's stack; they do not become a part of this module.
        dropout: probability of dropping a weight in training.
        direction: ``both``; ``lr``, keys up to the query; or ``rl``, keys from the query on. By
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
        super().__init__(positions, dropout, bias, layer, num_key_value_heads)
        draft_layer(self.spec, self.dims, self.kind, backend)  # refuses what the backend cannot do
        self.backend = backend
        self.direction = direction or ("lr" if self.dims.causal else "both")
        if self.direction not in DIRECTIONS or (self.dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        self.encodings = build_layer(self.spec, self.dims, layer)

    def forward(
        self,
        x: Tensor,
        shared: tuple[Shared, ...],
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to all tokens.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            shared: second result of the stack's positions in this forward pass.
            cache: this layer's cache; pass it empty in the first step of decoding, and the number
                of tokens in it as ``past`` to the stack's positions.
            need_weights: also return the attention weights, which only the reference backend
                computes.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.

        Raises:
            UserError: ``shared`` belongs to another stack or batch, or to other tokens than those
                in the cache and in ``x``.
        """
        state = self.select_state(shared)  # the one of this kind of layer
        positions = state.positions
        input_checks.check_layer_input(x, positions, cache, self.dims.embed_dim)
        input_checks.check_self_cache(cache, state, self.num_key_value_heads, self.head_dim)
        past_decay = None if cache is None else cache.decay  # sums of forget gates, by token
        of_input = self.encodings.input_terms(x, positions, past_decay)
        decay = of_input.find(Decay)  # sums of forget gates, for the cache
        if cache is not None and cache.kept is not None and (past_decay is None) != (decay is None):
            raise UserError("the cache is of a layer with other encodings: give each its own")
        # A cache keeps a table's rows by distance as this layer projected them, and gets new ones.
        terms = self.compute_terms(state, None if cache is None else cache.projected) | of_input
        query, key, value = self.project(x)  # [B, H, T, D]; keys and values may have fewer heads
        query, key = self.rotate_tokens(query, key, state)
        mask = state.mask.with_direction(self.direction)
        dropout = self.dropout if self.training else 0.0
        call = AttentionCall(query, key, value, terms, mask, dropout, need_weights)
        if cache is not None:
            tokens = positions.src_len
            kept = append_to_kept(cache.kept, key, value, tokens)  # rotated keys
            call = use_kept(call, kept, tokens)  # with these keys, to which terms and mask are cut
            cache.kept = kept.select(state.needed_keys(), tokens)  # for later steps
            cache.tokens, cache.decay = tokens, decay
            if not positions.counted:  # the caller gave position_ids
                # A later step joins its ids to these; a row for each beam, for `Cache.reorder`.
                cache.ids = positions.ids.expand(x.size(0), *positions.ids.shape[1:])
        attended, weights = attend(call, self.backend)
        return self.project_output(attended), weights


class CrossAttention(_LayerAttention):
    """Multi-head attention of a decoder's layer to the output of an encoder.

    With ``rope(cross_attention=true)`` queries are rotated by their positions in the target and
    keys by theirs in the source; otherwise positions play no part.

    Args:
        positions: positions of the decoder's stack; they do not become a part of this module.
        source_dim: width of the encoder's output; by default that of the decoder.
        dropout: probability of dropping a weight in training.
        bias: whether the projections have biases.
        layer: index of the layer in the stack, from 0; matters if the spec's layers differ.
        num_key_value_heads: as in :class:`SelfAttention`.

    Raises:
        UserError: ``num_key_value_heads`` does not divide H.
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
        super().__init__(positions, dropout, bias, layer, num_key_value_heads, source_dim)
        self.rotates = self.spec.select_layers([layer]).rotates_source

    def forward(
        self,
        x: Tensor,
        source: Tensor | None,
        shared: tuple[Shared, ...],
        source_padding_mask: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
        source_position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens to the source.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            source: output of the encoder, ``(batch, src_len, source_dim)``; None after the first
                step, when the cache has its keys.
            shared: second result of the decoder's positions in this forward pass.
            source_padding_mask: True for padding, ``(batch, src_len)``; it shifts no position.
            cache: this layer's cache for this source; pass it empty in the first step of decoding.
            need_weights: also return the attention weights.
            source_position_ids: positions of the source's tokens, ``(batch or 1, src_len)``, for
                keys that are rotated, in the first step; by default they are counted from 0.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.

        Raises:
            UserError: a mask, ids, a batch or a cache does not fit.
        """
        state = self.select_state(shared)
        input_checks.check_layer_input(x, state.positions, cache, self.dims.embed_dim)
        kept = None if cache is None else cache.kept
        if cache is not None and cache.tokens:  # self-attention counts them, this class never
            raise UserError("the cache is not of a CrossAttention: give each layer its own")
        if (kept is None) == (source is None):
            raise UserError(
                "pass the encoder's output as source in the first step; then source=None, as the "
                "cache holds its keys, or an empty cache for another source"
            )
        if source is not None:
            input_checks.check_embeddings("source", source, self.k_proj.in_features)
            key, value = self.k_proj(source), self.v_proj(source)
            kept = Kept(self.split_heads(key), self.split_heads(value))
        assert kept is not None, "there is a source or a cache"
        batch, _, src_len, _ = kept.key.shape
        if x.size(0) != batch:
            raise UserError(f"x has a batch size of {x.size(0)}, but its source {batch}")
        padding = input_checks.read_mask(
            "source_padding_mask", source_padding_mask, batch, src_len, x.device
        )
        query = self.split_heads(self.q_proj(x))  # [B, H, T, D]
        if self.rotates and state.rotation is not None:
            query = state.rotation.rotate_queries(query)
        if self.rotates and source is not None:
            rotate = partial(_rotate_source, state, padding, source_position_ids)
            deps = (source_padding_mask, source_position_ids, batch, src_len)  # same for all layers
            rotation = state.mask.cached("source", deps, rotate)  # once for all layers of a kind
            kept = kept._replace(key=rotation.rotate_keys(kept.key))
        if cache is not None:
            cache.kept = kept
        dropout = self.dropout if self.training else 0.0
        mask = Mask(key_padding=None if source_padding_mask is None else padding)
        call = AttentionCall(query, kept.key, kept.value, Terms([]), mask, dropout, need_weights)
        attended, weights = attend(call)
        return self.project_output(attended), weights


def _rotate_source(state: Shared, padding: Tensor, ids: Tensor | None) -> Rotation:
    """Compute the rotation of a source's keys, counted without padding, or at a caller's ids."""
    positions = Positions.from_padding(padding, tgt_len=0)  # there are keys alone
    if ids is not None:
        readers = {x.name: x for x in state.encodings if x.axes}  # 0 axes: it reads no ids
        name, (batch, src_len) = "source_position_ids", padding.shape
        ids = input_checks.read_position_ids(name, ids, readers, batch, (src_len,))
        positions = positions.replace_ids(ids, name)
    return cast(Rotation, state.rotation_at(positions.ids))  # `rope` has one
