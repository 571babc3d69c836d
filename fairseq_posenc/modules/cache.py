"""Keeps keys and values of earlier tokens, for decoding step by step.

B batch, H heads, T new tokens, S all tokens, K keys that are kept, D head size. The decay of forget
gates has G sums of logarithms at each token, one or two for each head, and each has two parts.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NeededKeys


class Kept(NamedTuple):
    """The K keys and values that a cache keeps; fairseq's, transformers' and ours share this form.

    Attributes:
        key: rotated keys, ``(B, H, K, D)``.
        value: values, ``(B, H, K, D)``.
        decay: decay of forget gates, ``(B, G, K, 2)``; None without gates.
        places: the index of each key among all tokens, ascending, int64 ``(K,)`` on the CPU: 0, 7,
            8, 9 of 10, for example; None for the last K.
    """

    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    places: Tensor | None = None

    def list_places(self, tokens: int) -> Tensor:
        """List the places of the keys, int64 ``(K,)``; ``tokens`` is the number of all tokens."""
        if self.places is not None:
            return self.places
        return torch.arange(tokens - self.key.size(2), tokens)

    def append(self, key: Tensor, value: Tensor, decay: Tensor | None, tokens: int) -> "Kept":
        """Append keys and values of new tokens.

        Args:
            key: rotated keys of the new tokens, ``(B, H, T, D)``.
            value: their values, ``(B, H, T, D)``.
            decay: decay of the kept and the new tokens, ``(B, G, K + T, 2)``, or None.
            tokens: number of all tokens, with the new ones.
        """
        places = self.places
        if places is not None:
            places = torch.cat([places, torch.arange(tokens - key.size(2), tokens)])
        keys = torch.cat([self.key, key], dim=2)  # [B, H, K, D]
        return Kept(keys, torch.cat([self.value, value], dim=2), decay, places)

    def select(self, needed: NeededKeys, tokens: int) -> "Kept":
        """Select the keys that later queries need: the last ones, and those at places ``first``."""
        count = self.key.size(2)  # among all `tokens`, which include those of this step
        if (last := needed.last) is None or (self.places is None and count <= last):
            return self  # None: they need all that are kept
        if needed.first is None and self.places is None:  # only last ones, and these are the last K
            # Cloned, because a slice would keep the whole tensor in memory.
            return self.map(lambda x: x[:, :, count - last :].clone(), None)
        places = self.list_places(tokens)
        stays = places >= tokens - last
        if needed.first is not None:
            stays = stays | torch.isin(places, needed.first)
        places = places[stays]
        index = stays.nonzero()[:, 0].to(self.key.device)
        without_gap = not len(places) or int(places[0]) == tokens - len(places)  # the last ones
        return self.map(lambda x: x.index_select(2, index), None if without_gap else places)

    def with_gaps(self, queries: int, tokens: int) -> "Kept":
        """Insert T - 1 keys of zeros at the beginning of each gap; no query sees them.

        With T = 3, keys at the places ``ab...fgh`` become ``ab00fgh``. Each query reads a table one
        row after the next query, so the rows of the T - 1 places after ``b`` are needed as well.

        Args:
            queries: T.
            tokens: number of all tokens.
        """
        if self.places is None or queries == 1:
            return self
        places = (self.places[:, None] + torch.arange(queries)).unique()
        places = places[places < tokens]
        index = torch.searchsorted(places, self.places).to(self.key.device)

        def spread(x: Tensor) -> Tensor:
            zeros = x.new_zeros(*x.shape[:2], len(places), x.size(3))
            return zeros.index_copy(2, index, x)

        return self.map(spread, places)

    def map(self, change: Callable[[Tensor], Tensor], places: Tensor | None) -> "Kept":
        """Change keys, values and decay in the same way; ``places`` are those of the result."""
        decay = None if self.decay is None else change(self.decay)
        return Kept(change(self.key), change(self.value), decay, places)


class KeyValueCache(Protocol):
    """The interface of a layer's cache: ours, or an adapter of fairseq's or transformers' own."""

    def past_decay(self) -> Tensor | None:
        """Read the decay of the kept tokens, ``(B, G, K, 2)``; None without forget gates."""

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """Append the keys and values of new tokens to those of earlier tokens.

        Args:
            key: rotated keys of the new tokens, ``(B, H, T, D)``.
            value: their values, ``(B, H, T, D)``.
            decay: decay of the kept and the new tokens, ``(B, G, K + T, 2)``.
            needed: the keys that queries of later steps may see; the others are dropped.

        Returns:
            Keys, values and decay that the new queries may see.
        """


class Cache:
    """Keys and values of one layer, for decoding step by step; empty before the first step."""

    def __init__(self) -> None:
        self.kept: Kept | None = None  # a CrossAttention sets it, once; for others `extend` does
        # All tokens that were read, including those of dropped keys; 0 in a CrossAttention's cache.
        self.tokens = 0
        self.ids: Tensor | None = None  # of self-attention: positions that a caller gave, (B, S)
        self.rows = ProjectedRows()  # of tables by distance, for all sentences: not reordered

    def __bool__(self) -> bool:
        return self.kept is not None

    def past_decay(self) -> Tensor | None:
        """See :class:`KeyValueCache`."""
        return None if self.kept is None else self.kept.decay

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """See :class:`KeyValueCache`.

        Raises:
            UserError: the cache has decays of forget gates and this layer has none, or vice versa.
        """
        tokens = self.tokens + key.size(2)
        visible = Kept(key, value, decay)
        if self.kept is not None:
            if (self.kept.decay is None) != (decay is None):
                raise UserError("the cache is of a layer with other encodings: give each its own")
            visible = self.kept.append(key, value, decay, tokens)
        self.kept, self.tokens = visible.select(needed, tokens), tokens
        return visible

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the batch, ``(new batch,)``, as beam search does after each step."""

        def select(x: Tensor) -> Tensor:
            return x.index_select(0, rows)

        if self.kept is not None:
            self.kept = self.kept.map(select, self.kept.places)
        self.ids = None if self.ids is None else select(self.ids)
