"""Keeps what our attention needs of earlier tokens in transformers' caches.

The decay of a token is, for each head, a sum of logarithms of forget gates, as two numbers whose
sum is more exact than one. Layers of the cache after the model's keep it: transformers reorders,
selects, crops and copies them with the keys. B batch, S tokens, T of them new, H heads.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.errors import UserError

_ROWS = "fairseq_posenc_rows"  # attribute of a layer of a cache
# Attribute of a cache that our positions filled: a bool tensor `()`, whether its tokens have
# positions other than 0, 1, ...; None if no ids or documents were given, or not looked at.
UNCOUNTED = "fairseq_posenc_uncounted"

# What to do about caches, or masks for types of layers, that were made for other windows.
CACHE_ADVICE = (
    "make caches after set_positions, as DynamicCache(config=model.config); in a model around this "
    "one, let its config.text_config be this one's config; give copied layers their own layer_idx"
)


def find_self_cache(values: Iterable[Any]) -> Cache | None:
    """Find the cache of self-attention among arguments or results, as its name differs."""
    cache = next((value for value in values if isinstance(value, Cache)), None)
    return getattr(cache, "self_attention_cache", cache)  # an encoder-decoder's has two


def find_projected_rows(cache: Cache | None, attention: Any, past: int) -> ProjectedRows:
    """Find the rows of DeBERTa's table that a layer projected for ``past`` tokens, to add more.

    For 0 tokens there are none yet: the cache may have served other weights before.
    """
    if cache is None:
        return ProjectedRows()
    layer = cache.layers[attention.layer_idx]
    if not past or not hasattr(layer, _ROWS):
        setattr(layer, _ROWS, ProjectedRows())
    return cast(ProjectedRows, getattr(layer, _ROWS))


def read_decay(cache: Cache | None, gates_layer: int, past: int) -> Decay | None:
    """Read the decay of ``past`` tokens, None for 0 of them; refuse a cache that lacks it."""
    if not past:
        return None
    layers = [] if cache is None else cache.layers[gates_layer:]
    if not layers or layers[0].get_seq_length() != past:
        raise UserError(f"the cache lacks gates of {past} tokens: make it after set_positions")
    return Decay(torch.cat([layers[0].keys, layers[0].values], -1))  # [B, H, S - T, 2]


def store_decay(cache: Cache, gates_layer: int, decay: Decay) -> None:
    """Store the decay of all S tokens, to read it in the next step."""
    while len(cache.layers) <= gates_layer:
        cache.layers.append(DynamicLayer())
    cache.layers[gates_layer] = DynamicLayer()  # an empty one: `update` appends to what a layer has
    # For keys before a query (`earlier`), [B, H, S, 2]: a cache layer has a tensor for each number.
    cache.layers[gates_layer].update(*decay.earlier.split(1, -1))  # [B, H, S, 1] each
