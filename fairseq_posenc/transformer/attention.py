"""Multi-head self-attention whose position encodings are parts: the one attention override.

fairseq's ``(T, B, C)`` layout exists only in the first and last lines of ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.shared import Shared
from fairseq_posenc.transformer.decoding import cached_terms, lookahead_positions, slice_for_step
from fairseq_posenc.transformer.forward_context import current_context

IncrementalState = dict[str, dict[str, Tensor | None]] | None


class PositionalAttention(AttentionCore, MultiheadAttention):
    """fairseq's self-attention with position encodings, directions and a choice of backend.

    It stays a subclass because decoder layers, the BERT initialisation and beam search rely on
    fairseq's class; projections, cache format and beam reordering are inherited from it, and
    ``project``, ``terms`` and ``merge_heads`` from :class:`AttentionCore`.

    Args:
        embed_dim: C.
        num_heads: H.
        encodings: the encodings of this layer, those of the input excepted.
        direction: ``both``, ``lr`` or ``rl`` (see :class:`~fairseq_posenc.backends.mask.Mask`).
        backend: ``auto`` or the name of a backend.
        kind: number of its kind of layer where layers differ, by which ``current_context`` selects
            what the stack computed.
        **kwargs: fairseq's own.
    """

    batch_first = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encodings: Encodings,
        direction: str = "both",
        backend: str = "auto",
        kind: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, self_attention=True, **kwargs)
        if self.use_xformers or self.bias_k is not None or self.add_zero_attn:
            raise UserError("position encodings do not work with xformers or added key biases")
        self.encodings, self.direction = encodings, direction
        self.backend, self.kind = backend, kind

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which asks this of every part of a model."""
        raise UserError(
            "TorchScript is not supported: position encodings and backends are chosen in Python"
        )

    def _adaptive_prune_heads(self, reserve_head_index: list[tuple[int, int]]) -> None:
        """Refuse fairseq's pruning of heads, which knows nothing of what encodings keep a head."""
        raise UserError(
            "heads with position encodings cannot be pruned: fairseq cuts the projections, but "
            "not the tables, slopes and buckets of the heads"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq's class does: ``(T, B, C)`` in and out, weights ``(B, T, S)``.

        Raises:
            UserError: ``static_kv`` or ``before_softmax``, which self-attention never needs; or
                ``torch.jit.trace``, which would keep the lengths and padding of its example.
        """
        if torch.jit.is_tracing():
            self.__prepare_scriptable__()
        if static_kv or before_softmax:
            raise UserError("static_kv and before_softmax have no meaning in self-attention here")
        need_weights = need_weights or need_head_weights
        cache = self._get_input_buffer(incremental_state)
        shared = current_context() or self._compute_shared(query, cache, key_padding_mask)
        q, k, v = self.project(query, shared)  # [B, H, T, D]
        decay = self.encodings.decay(  # [B, G, S], sums over the keys, cached ones included
            query.transpose(0, 1), shared.positions, cache.get("prev_decay")
        )
        if incremental_state is not None:
            k, v, key_padding_mask = self._extend_cache(
                incremental_state, cache, k, v, key_padding_mask, decay, shared
            )
        terms = self._compute_step_terms(incremental_state, q.size(2), k.size(2), shared)
        terms = terms.with_decay(decay, self.num_heads)
        mask = self._build_mask(key_padding_mask, attn_mask, shared, k.size(2))
        drops = self.dropout_module.training or self.dropout_module.apply_during_inference
        dropout = float(self.dropout_module.p) if drops else 0.0
        attended, weights = attend(q, k, v, terms, mask, dropout, need_weights, self.backend)
        if weights is not None:
            # [B, H, T, S] -> [H, B, T, S] or [B, T, S], as fairseq's class returns them
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return self.merge_heads(attended), weights

    def _compute_step_terms(
        self, state: IncrementalState, tgt_len: int, src_len: int, shared: Shared
    ) -> Terms:
        """Compute the terms of a call; in decoding, slice them from those of many steps."""
        positions, span = shared.positions, shared.span
        seen_tokens = positions.tokens.size(1)
        dropped_keys = seen_tokens - src_len  # the cache drops what is outside the window
        if span is None:  # the stack keeps no terms from step to step: compute those of this call
            span = Span.from_lengths(tgt_len, seen_tokens, positions.tokens.device)
            return self.terms(span, shared).without_first_keys(dropped_keys)
        key = self._get_full_incremental_state_key("terms")

        def compute(span: Span) -> Terms:
            ahead = lookahead_positions(positions, span)
            return self.terms(span, shared._replace(positions=ahead))

        steps = cached_terms(state, key, span, compute)
        # These have a number for each query or token, not for each distance or pair, so they cannot
        # be sliced; the stack has computed those of this step.
        now = slice_for_step(steps, seen_tokens)._replace(
            temperature=shared.terms.temperature,
            decay=shared.terms.decay,
            later_decay=shared.terms.later_decay,
        )
        return now.without_first_keys(dropped_keys)

    def _extend_cache(
        self,
        incremental_state: IncrementalState,
        cache: dict[str, Tensor | None],
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        decay: Tensor | None,
        shared: Shared,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys, values and padding to those of earlier steps, and cache them for the next.

        The format is fairseq's, so its beam reordering works on it; keys are stored rotated. Those
        that lie before a window are dropped.
        """
        past_key, past_value = cache.get("prev_key"), cache.get("prev_value")
        if past_key is not None and past_value is not None:
            key = torch.cat([past_key, key], dim=2)  # [B, H, S, D]
            value = torch.cat([past_value, value], dim=2)
        padding = self._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=cache.get("prev_key_padding_mask"),
            batch_size=key.size(0),
            src_len=key.size(2),
            static_kv=False,
        )
        # Outside a stack later steps count their positions from the cached keys: all are kept.
        needed = shared.locality.needed_keys() if current_context() else None
        first = 0 if needed is None else max(key.size(2) - needed, 0)
        buffer = {
            "prev_key": key[:, :, first:],  # [B, H, kept, D]
            "prev_value": value[:, :, first:],
            "prev_key_padding_mask": None if padding is None else padding[:, first:],  # [B, kept]
        }
        if decay is not None:
            buffer["prev_decay"] = decay[:, :, first:]
        self._set_input_buffer(incremental_state, buffer)
        return key, value, padding

    def _build_mask(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        shared: Shared,
        src_len: int,
    ) -> Mask:
        """Combine fairseq's masks with this layer's direction and limits."""
        padding = None if key_padding_mask is None else key_padding_mask.bool()
        # Additive masks only ever mean "not this pair"; values such as -1e8 could be beaten.
        pairs = None if attn_mask is None else attn_mask.bool()
        locality = shared.locality
        if locality.segments is not None:  # the segments of keys that a cache has not dropped
            locality = locality._replace(segments=locality.segments[:, -src_len:])
        return Mask(self.direction, padding, pairs, shared.cache, locality)

    def _compute_shared(
        self, query: Tensor, cache: dict[str, Tensor | None], key_padding_mask: Tensor | None
    ) -> Shared:
        """Compute the position state of a call outside a stack, where only padding is known."""
        past = cache.get("prev_key")
        tgt_len, batch = query.shape[:2]
        if key_padding_mask is None or past is not None:
            src_len = tgt_len if past is None else tgt_len + past.size(2)
            tokens = torch.zeros(batch, src_len, dtype=torch.long, device=query.device)  # [B, S]
        else:
            tokens = key_padding_mask.long()
        positions = Positions.from_tokens(tokens, padding_idx=1, eos_idx=-1, tgt_len=tgt_len)
        # `terms` adds this layer's own to those of the stack; kept here, they would count twice.
        return Shared.compute(self.encodings, positions)._replace(terms=Terms())
