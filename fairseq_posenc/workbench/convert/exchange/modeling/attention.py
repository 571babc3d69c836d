"""Computes self-attention of a layer, and attention to an encoder's output.

B sentences, T queries, S keys, H heads, D head size, C model size. Exported folders hold a copy of
this module (see the package).
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from fairseq_posenc.backends import reference, sdpa
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.locality import NeededKeys
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.cache import Kept
from fairseq_posenc.shared import Shared
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import StackConfig


class Memory(NamedTuple):
    """An encoder's output, to which a decoder attends."""

    states: Tensor  # [B, S, C]
    padding: Optional[Tensor]  # [B, S], True for padding


class LayerCache:
    """The keys and values of a layer in a cache of transformers.

    A cache of transformers has no place for the decay of forget gates: a sum in two parts for each
    token and head. Its float32 bits are stored in additional coordinates of the keys, so that it is
    reordered and cut with them.
    """

    def __init__(self, cache: Cache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    def past_decay(self, key: Tensor) -> Optional[Tensor]:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        layers = getattr(self.cache, "layers", ())
        width = key.size(-1)
        keys = layers[self.layer].keys if self.layer < len(layers) else None
        if keys is None or not keys.numel() or keys.size(-1) == width:
            return None
        bits = keys[..., width:].clone(memory_format=torch.contiguous_format)
        return bits.view(torch.promote_types(keys.dtype, torch.float32))  # [B, H, S, 2]

    def extend(
        self, key: Tensor, value: Tensor, decay: Optional[Tensor], needed: NeededKeys
    ) -> Kept:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`; ``needed`` is not used."""
        if decay is None:
            return Kept(*self.cache.update(key, value, self.layer))  # [B, H, S, D]
        # Of the new tokens, [B, H, T, 2 or 4]: a float32 has the bits of two float16.
        bits = decay[:, :, -key.size(2) :].detach().view(key.dtype)
        keys, value = self.cache.update(torch.cat([key, bits], -1), value, self.layer)
        return Kept(keys[..., : key.size(-1)], value, decay)


class Attention(AttentionCore, nn.Module):
    """Multi-head self-attention of a layer, with position encodings.

    Args:
        config: configuration of the stack.
        layer: index of the layer.
        encodings: encodings of this layer.
        kv_dim: width of the inputs of keys and values; by default that of queries.
    """

    def __init__(
        self, config: StackConfig, layer: int, encodings: Encodings, kv_dim: Optional[int] = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = config.attention_dropout
        # The attributes of `AttentionCore`.
        self.num_heads = config.num_heads
        self.head_dim = config.embed_dim // config.num_heads
        self.direction = config.directions[layer]
        self.rotates = any(
            options.get("cross_attention") for options in config.layer(layer).values()
        )
        self.encodings = encodings
        width = config.embed_dim
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(kv_dim or width, width)
        self.v_proj = nn.Linear(kv_dim or width, width)

    def forward(
        self, x: Tensor, shared: Shared, cache: Optional[Cache], need_weights: bool
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend to all tokens so far: ``(B, T, C)`` in and out; also return requested weights."""
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
        """Attend with torch's kernels if they support the terms, else with the reference."""
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
        """Attend to the memory; when decoding, its keys and values are computed only once."""
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
        mask = Mask(key_padding=memory.padding)
        call = AttentionCall(query, key, value, Terms(), mask, dropout, need_weights)
        return self.attend(call)
