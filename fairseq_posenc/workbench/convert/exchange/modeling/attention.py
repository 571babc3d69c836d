"""Attention of a layer: to its own stack, and to an encoder's output."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from fairseq_posenc.backends import reference, sdpa
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.positions import Span
from fairseq_posenc.shared import Shared
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import StackConfig


class Memory(NamedTuple):
    """What a decoder attends to: an encoder's output ``(B, S, C)``, and True for padding."""

    states: Tensor
    padding: Optional[Tensor]


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
        self.rotates = any(each.get("cross_attention") for each in config.layer(layer).values())
        self.dropout = config.attention_dropout
        self.encodings = encodings
        width, kv_dim = config.embed_dim, kv_dim or config.embed_dim
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(kv_dim, width) for _ in range(2))

    def forward(
        self, x: Tensor, shared: Shared, cache: Optional[Cache], need_weights: bool
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend to the tokens up to now: ``(B, T, C)`` in and out, and the weights on demand."""
        query, key, value = self.project(x, shared)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        decay = self.encodings.decay(x, shared.positions, self._read_decay(cache, key.size(-1)))
        if cache is not None:
            key, value, decay = self._extend_cache(cache, key, value, decay)
        src_len = shared.positions.tokens.size(1)
        dropped = src_len - key.size(2)  # a cache drops what no query sees
        terms = self.terms(Span.from_lengths(query.size(2), src_len, x.device), shared)
        terms = terms.without_first_keys(dropped).with_decay(decay, self.num_heads)
        mask = shared.mask(self.direction).without_first_keys(dropped)
        return self.attend(query, key, value, terms, mask, need_weights)

    def _extend_cache(
        self, cache: Cache, key: Tensor, value: Tensor, decay: Optional[Tensor]
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Append keys, values and decay to those of earlier steps, and cache them for the next.

        The decay is kept bit for bit in further coordinates of the keys, so that it is reordered
        and cut with them: a cache has no other place for it, and 16 bits would not hold it.
        """
        if decay is None:
            return *cache.update(key, value, self.layer), None  # [B, H, S, D]
        bits = decay[:, :, -key.size(2) :].detach().view(key.dtype)  # of 2 numbers
        keys, value = cache.update(torch.cat([key, bits], -1), value, self.layer)
        return keys[..., : key.size(-1)], value, decay

    def _read_decay(self, cache: Optional[Cache], width: int) -> Optional[Tensor]:
        """Read the decay behind the ``width`` of keys in a cache, ``(B, H, S, 2)``, if there is."""
        layers = getattr(cache, "layers", ())
        keys = layers[self.layer].keys if self.layer < len(layers) else None
        if keys is None or not keys.numel() or keys.size(-1) == width:
            return None
        bits = keys[..., width:].clone(memory_format=torch.contiguous_format)
        return bits.view(torch.promote_types(keys.dtype, torch.float32))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: Terms,
        mask: Mask,
        need_weights: bool,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend with torch's kernels where the scores are a dot product and a bias."""
        dropout = self.dropout if self.training else 0.0
        call = AttentionCall(query, key, value, terms, mask, dropout, need_weights)
        attend = reference.attend if sdpa.refuses(terms, call.features) else sdpa.attend
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
        query = self.split_heads(self.q_proj(x))
        if self.rotates and shared.rotation is not None:
            query = shared.rotation.rotate_queries(query)
        if cache is not None and cache.is_updated.get(self.layer):
            kept = cache.cross_attention_cache.layers[self.layer]
            key, value = kept.keys, kept.values
        else:
            key, value = (self.split_heads(p(memory.states)) for p in (self.k_proj, self.v_proj))
            if self.rotates and shared.source is not None:
                key = shared.source.rotate_keys(key)
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer)
                cache.is_updated[self.layer] = True
        mask = Mask(key_padding=memory.padding)
        return self.attend(query, key, value, Terms(), mask, need_weights)
