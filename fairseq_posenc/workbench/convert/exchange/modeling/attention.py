"""Attention of a layer: to its own stack, and to an encoder's output."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from fairseq_posenc.backends import reference, sdpa
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.shared import Shared
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import StackConfig


class Memory(NamedTuple):
    """What a decoder attends to: an encoder's output ``(B, S, C)``, and True for padding."""

    states: Tensor
    padding: Optional[Tensor]


class LayerCache:
    """The keys and values of a layer, in a cache of transformers'.

    The decay is kept bit for bit in further coordinates of the keys, so that it is reordered and
    cut with them: a cache has no other place for it, and 16 bits would not hold it.

    Args:
        cache: of all layers.
        layer: its number.
    """

    def __init__(self, cache: Cache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    def past_decay(self, key: Tensor) -> Optional[Tensor]:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        layers, width = getattr(self.cache, "layers", ()), key.size(-1)
        keys = layers[self.layer].keys if self.layer < len(layers) else None
        if keys is None or not keys.numel() or keys.size(-1) == width:
            return None
        bits = keys[..., width:].clone(memory_format=torch.contiguous_format)
        return bits.view(torch.promote_types(keys.dtype, torch.float32))

    def extend(
        self, key: Tensor, value: Tensor, decay: Optional[Tensor], needed: Optional[int]
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`; the cache knows its windows."""
        if decay is None:
            return *self.cache.update(key, value, self.layer), None  # [B, H, S, D]
        bits = decay[:, :, -key.size(2) :].detach().view(key.dtype)  # of 2 numbers
        keys, value = self.cache.update(torch.cat([key, bits], -1), value, self.layer)
        return keys[..., : key.size(-1)], value, decay


class Attention(AttentionCore, nn.Module):
    """Multi-head self-attention of a layer, with position encodings.

    Args:
        config: of the stack.
        layer: its number.
        encodings: of this layer.
        kv_dim: width of the inputs of keys and values; by default the queries'.
    """

    def __init__(
        self, config: StackConfig, layer: int, encodings: Encodings, kv_dim: Optional[int] = None
    ) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, config.num_heads
        self.head_dim = config.embed_dim // config.num_heads
        self.direction = config.directions[layer]
        self.rotates = any(
            options.get("cross_attention") for options in config.layer(layer).values()
        )
        self.dropout = config.attention_dropout
        self.encodings = encodings
        width, kv_dim = config.embed_dim, kv_dim or config.embed_dim
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(kv_dim, width) for _ in range(2))

    def forward(
        self, x: Tensor, shared: Shared, cache: Optional[Cache], need_weights: bool
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend to the tokens up to now: ``(B, T, C)`` in and out, and the weights on demand."""
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        kept = None if cache is None else LayerCache(cache, self.layer)
        dropout = self.dropout if self.training else 0.0
        query, key, value = self.project(x)
        call = self.make_call(
            query, key, value, shared, x, kept, dropout=dropout, need_weights=need_weights
        )
        return self.attend(call)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Optional[Tensor]]:
        """Attend with torch's kernels where the scores are a dot product and a bias."""
        attend = reference.attend if sdpa.refuses(call.terms, call.features) else sdpa.attend
        attended, weights = attend(call)
        return self.merge_heads(attended), weights


class CrossAttention(Attention):
    """Attention of a decoder's layer to the encoder's output."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        shared: Shared,
        cache: Optional[EncoderDecoderCache],
        need_weights: bool,
        memory: Memory,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend to the memory, whose keys and values a generation computes once."""
        query = self.project_query(x, shared)
        if cache is not None and cache.is_updated.get(self.layer):
            kept = cache.cross_attention_cache.layers[self.layer]
            key, value = kept.keys, kept.values
        else:
            key, value = self.project_source(memory.states, shared)
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer)
                cache.is_updated[self.layer] = True
        dropout = self.dropout if self.training else 0.0
        return self.attend(
            self.make_source_call(query, key, value, memory.padding, dropout, need_weights)
        )
