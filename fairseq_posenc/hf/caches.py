"""Keeps what our attention needs of earlier tokens in additional layers of transformers' caches.

So it is reordered, repeated, selected, cropped and copied with the keys. The letters of shapes are
those of :mod:`~fairseq_posenc.encodings.base`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.locality import NeededKeys
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.cache import Kept

_ROWS = "fairseq_posenc_rows"  # attribute of a layer of a cache


class Tokens(NamedTuple):
    """What a caller says of the tokens of a pass, besides their padding.

    Attributes:
        ids: position ids, ``(B or 1, S)`` or ``(B or 1, S, axes)``; None if they count tokens.
        documents: number of each token's document, ``(B, S)``; None without ``documents``.
        ends: True for tokens that end a sentence, ``(B, S)``; None if that is not known.
    """

    ids: Tensor | None = None
    documents: Tensor | None = None
    ends: Tensor | None = None

    @classmethod
    def load(cls, cache: Cache | None, place: int, past: int) -> "Tokens | None":
        """Load what was stored of the tokens in a cache; None if nothing was.

        Args:
            cache: cache of self-attention, or None.
            place: index of the additional layer.
            past: number of the tokens in the cache.
        """
        layer = find_layer(cache, place, past)
        if layer is None:
            return None
        marks, ids = layer.keys[:, 0], layer.values[:, 0]  # [B, S, 2], [B, S, 0 or axes]
        axes = ids.size(-1)
        places = ids.squeeze(-1) if axes == 1 else ids
        return cls(places if axes else None, marks[..., 0], marks[..., 1].bool())

    @property
    def is_known(self) -> bool:
        """Whether callers said anything."""
        return any(x is not None for x in self)

    def store(self, cache: Cache, place: int, batch: int) -> None:
        """Store this, of all tokens of a batch, as a layer of a cache."""
        known = next(x for x in (self.documents, self.ends, self.ids) if x is not None)
        length = known.size(1)
        absent = known.new_zeros(batch, length, dtype=torch.long)
        parts = [absent if x is None else x.long() for x in (self.documents, self.ends)]
        ids = absent[..., None][..., :0] if self.ids is None else self.ids
        ids = ids[..., None] if ids.dim() == 2 else ids
        layer = add_layer(cache, place)
        layer.update(torch.stack(parts, -1)[:, None], ids.expand(batch, -1, -1)[:, None])


def find_self_cache(values: Iterable[Any]) -> Cache | None:
    """Find the cache of self-attention among arguments or results, as its name differs."""
    cache = next((value for value in values if isinstance(value, Cache)), None)
    return getattr(cache, "self_attention_cache", cache)  # an encoder-decoder's has two


def find_layer(cache: Cache | None, place: int, past: int) -> DynamicLayer | None:
    """Find an additional layer of a cache; None if it has none, or no tokens.

    Raises:
        UserError: the layer is of another number of tokens than the cache, ``past``.
    """
    if not past or cache is None or place >= len(cache.layers):
        return None
    layer = cache.layers[place]
    if (tokens := layer.get_seq_length()) != past:
        raise UserError(
            f"the cache has {past} tokens, and the positions of {tokens}: start with an empty "
            "cache after set_positions"
        )
    return layer


def add_layer(cache: Cache, place: int) -> DynamicLayer:
    """Put a new empty layer at a place of a cache, beyond the layers of the model."""
    while len(cache.layers) <= place:
        cache.layers.append(DynamicLayer())
    cache.layers[place] = DynamicLayer()
    return cache.layers[place]


def find_rows(cache: Cache | None, attention: Any, earlier: int) -> ProjectedRows:
    """Find the content rows that a layer has projected for earlier tokens in a cache, to add to.

    Args:
        cache: transformers' cache of all layers, or None.
        attention: the model's attention module, which knows the index of its layer.
        earlier: number of earlier tokens; with 0, a cache may be used again with other weights.
    """
    if cache is None:
        return ProjectedRows()
    layer: Any = cache.layers[attention.layer_idx]
    if not earlier or not hasattr(layer, _ROWS):
        setattr(layer, _ROWS, ProjectedRows())
    rows: ProjectedRows = getattr(layer, _ROWS)
    return rows


class DecayCache(NamedTuple):
    """A :class:`~fairseq_posenc.modules.cache.KeyValueCache` for the decay of forget gates alone.

    transformers has put the keys and values into its cache before it calls our attention.

    Attributes:
        cache: transformers' cache of all layers, or None.
        place: index of the additional layer.
        earlier: number of earlier tokens.
    """

    cache: Cache | None
    place: int
    earlier: int

    def past_decay(self, key: Tensor) -> Tensor | None:
        """Return the decay of the earlier tokens, ``(B, G, S - T, 2)``, or None if there are none.

        ``key`` is for hosts that store the decay inside wider keys; it is not needed here.

        Raises:
            UserError: the cache has the decay of a different number of tokens.
        """
        if not self.earlier:
            return None
        layer = find_layer(self.cache, self.place, self.earlier)
        if layer is None:
            raise UserError(
                "the cache has no forget gates: start with an empty cache after set_positions"
            )
        return torch.cat([layer.keys, layer.values], -1)

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """Store the decay of all tokens; return the keys and values, which are complete."""
        assert decay is not None, "only layers with gates have this cache"
        if self.cache is not None:
            # A cache layer has two tensors, so each of them holds one of a token's two numbers.
            add_layer(self.cache, self.place).update(*decay.split(1, -1))  # [B, G, S, 1] each
        # In a layer with a window, transformers' cache has dropped the keys that no query sees.
        dropped = decay.size(2) - key.size(2)
        return Kept(key, value, decay[:, :, dropped:])
