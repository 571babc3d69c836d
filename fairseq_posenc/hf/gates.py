"""Gives forget gates access to the input of a layer, and stores their decay in its cache."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from fairseq_posenc.errors import UserError


def find_inputs(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Find the input of a layer, ``(B, T, C)``, among the arguments of its attention."""
    inputs: Tensor = args[0] if args else named["hidden_states"]
    return inputs


def find_cache(args: tuple[Any, ...], named: dict[str, Any]) -> Cache | None:
    """Find the cache of self-attention among the arguments of an attention."""
    cache = next((x for x in (*named.values(), *args) if isinstance(x, Cache)), None)
    return getattr(cache, "self_attention_cache", cache)


def read_decay(cache: Cache | None, place: int, count: int) -> Tensor | None:
    """Read the decay of earlier tokens, ``(B, G, count, 2)``; None if there are none.

    Args:
        cache: cache of all layers.
        place: index of the cache layer that stores the decay.
        count: number of earlier tokens.

    Raises:
        UserError: the cache has the decay of a different number of tokens.
    """
    if not count:
        return None
    layer = cache.layers[place] if cache is not None and place < len(cache.layers) else None
    kept = 0 if layer is None else int(layer.get_seq_length())
    if layer is None or kept != count:
        raise UserError(
            f"the cache has {count} tokens, and the forget gates of {kept}: start with an empty "
            "cache after set_positions"
        )
    return torch.cat([layer.keys, layer.values], -1)  # [B, G, S, 2]


def keep_decay(cache: Cache, place: int, decay: Tensor) -> None:
    """Append the decay of new tokens, ``(B, G, T, 2)``, to an additional layer of a cache.

    As a layer of the cache, it is reordered, repeated and cropped together with the keys.
    """
    while len(cache.layers) <= place:
        cache.layers.append(DynamicLayer())
    cache.layers[place].update(decay[..., :1], decay[..., 1:])
