"""Adapts fairseq's self-attention: its arguments and its cache, for :class:`AttentionCore`."""

from typing import Any, NamedTuple

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NeededKeys
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.cache import Kept
from fairseq_posenc.transformer.forward_context import current_layer

IncrementalState = dict[str, dict[str, Tensor | None]] | None
_NO_TORCHSCRIPT = "TorchScript is not supported: encodings and backends are chosen in Python"


class IncrementalCache(NamedTuple):
    """Keys and values of a layer in fairseq's format, so that its beam reordering works on them.

    Attributes:
        buffer: the layer's buffer in fairseq's incremental state; changed in place.
        padding: True for padding, for all tokens, ``(B, S)``.
        tokens: S, the number of all tokens, including those of this step and of dropped keys.
    """

    buffer: dict[str, Tensor | None]
    padding: Tensor | None
    tokens: int

    def past_decay(self) -> Tensor | None:
        """Read the kept tokens' sums of logarithms of forget gates, ``(B, G, K, 2)``, or None."""
        return self.buffer.get("prev_decay")  # G: 1 or 2 sums per head; 2: rounded sum, rest

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """Append new keys and values, ``(B, H, T, D)``; ``decay`` is of kept and new tokens."""
        past_key = self.buffer.get("prev_key")
        past_value = self.buffer.get("prev_value")
        # B batch, H heads, T new of S tokens, D head size; later steps may need fewer keys.
        visible = Kept(key, value, decay)
        if past_key is not None and past_value is not None:
            places = self.buffer.get("prev_places")  # a row for each beam, all of them equal
            past = Kept(past_key, past_value, places=None if places is None else places[0].cpu())
            visible = past.append(key, value, decay, self.tokens)  # decay replaces the past one
        stored = visible.select(needed, self.tokens)  # last keys and some first ones, for later
        places = stored.places
        if places is not None:  # in each row, as fairseq reorders rows
            places = places.to(key.device).expand(key.size(0), -1)
        self.buffer.update(
            prev_key=stored.key,
            prev_value=stored.value,
            prev_key_padding_mask=self.padding,  # of all tokens, also those without a key
            prev_places=places,
            prev_decay=stored.decay,
        )
        return visible


class PositionalAttention(AttentionCore, MultiheadAttention):
    """fairseq's self-attention with position encodings, directions and a choice of backend.

    Decoder layers, BERT's initialisation and beam search rely on fairseq's class, so this is a
    subclass: projections, cache format and beam reordering are inherited from it, the steps of
    attention from :class:`AttentionCore`.

    Args:
        embed_dim: C, the width of the model.
        num_heads: H, the number of heads.
        encodings: the encodings of this layer, without those of the input.
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
        backend: ``auto`` or the name of a backend.
        kind: index of this layer's encodings among the different layers (``Spec.layer_kinds``).
        **kwargs: passed on to fairseq's class.
    """

    batch_first = False  # AttentionCore's steps read it: inputs are (T, B, C)

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
        if self.use_xformers or self.bias_k is not None or self.add_zero_attn:  # fairseq's
            raise UserError("position encodings do not work with xformers or added key biases")
        self.encodings = encodings
        self.direction = direction
        self.backend = backend
        self.kind = kind  # by which `inject_context` selects the state for the layer

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which calls this method of every submodule."""
        raise UserError(_NO_TORCHSCRIPT)

    def _adaptive_prune_heads(self, reserve_head_index: list[tuple[int, int]]) -> None:
        """Refuse fairseq's pruning of heads, which leaves the encodings' tables by head as is."""
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
        """Attend as fairseq's class does, but only in a stack, which computes the position state.

        Inputs and outputs are ``(T, B, C)``, weights ``(B, T, S)``; key and value are not read.

        Raises:
            UserError: ``static_kv`` or ``before_softmax``, which self-attention never needs; or
                ``torch.jit.trace``, which would keep the lengths and padding of its example.
        """
        if torch.jit.is_tracing():
            raise UserError(_NO_TORCHSCRIPT)
        if static_kv or before_softmax:
            raise UserError("static_kv and before_softmax have no meaning in self-attention here")
        shared = current_layer()  # the layer's forward has set it; refuses a call from elsewhere
        buffer = self._get_input_buffer(incremental_state)  # past keys and values; {} if none
        # fairseq gives the padding of the new tokens, None if none is padding. A mask is needed if
        # they or earlier tokens have padding; the positions have that of all S tokens.
        is_padded = key_padding_mask is not None or buffer.get("prev_key_padding_mask") is not None
        padding = shared.positions.padding if is_padded else None
        cache = rows = None
        if incremental_state is not None:
            cache = IncrementalCache(buffer, padding, shared.positions.src_len)
            # Projected rows of DeBERTa's table, under a key of this module; all beams share them.
            values: dict[str, Any] = incremental_state
            key_of_rows = self._get_full_incremental_state_key("rows")
            rows = values.setdefault(key_of_rows, ProjectedRows())  # `compute_terms` adds new ones
        drops = self.dropout_module.training or self.dropout_module.apply_during_inference
        call = self.make_call(  # also extends the cache
            *self.project(query),
            shared,
            inputs=query.transpose(0, 1),  # [B, T, C]; forget gates and states are computed from it
            cache=cache,
            mask=shared.mask.with_direction(self.direction)._replace(
                key_padding=padding,
                # fairseq's additive masks mean "not this pair". Added as finite values such as
                # -1e8, they could be outweighed by other terms.
                pairs=None if attn_mask is None else attn_mask.bool(),
            ),
            terms=self.compute_terms(shared, rows),
            dropout=float(self.dropout_module.p) if drops else 0.0,
            need_weights=need_weights or need_head_weights,
        )
        if incremental_state is not None:
            self._set_input_buffer(incremental_state, buffer)  # which `cache` has extended in place
        attended, weights = attend(call, self.backend)
        if weights is not None:
            # [B, H, T, S] -> [H, B, T, S] or [B, T, S], as fairseq's class returns them
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return self.merge_heads(attended), weights
