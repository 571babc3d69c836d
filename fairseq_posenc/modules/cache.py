"""Keeps keys and values of earlier tokens, for decoding step by step.

B batch, H heads, T new tokens, S all tokens, K keys that are kept, D head size. The decay of forget
gates has G sums of logarithms at each token, one or two for each head, and each has two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fairseq_posenc.encodings.locality import NeededKeys
from fairseq_posenc.errors import UserError


class Kept(NamedTuple):
    """The K keys and values that a cache keeps, in a layout that all hosts share.

    Attributes:
        key: rotated keys, ``(B, H, K, D)``.
        value: values, ``(B, H, K, D)``.
        decay: decay of forget gates, ``(B, G, K, 2)``; None without gates.
        places: the index of each key among all tokens, ascending, int64 ``(K,)`` on the CPU; None
            for those of the last K tokens.
    """

    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    places: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, decay: Tensor | None, tokens: int) -> Kept:
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

    def select(self, needed: NeededKeys, tokens: int) -> Kept:
        """Select the keys that later queries need; ``tokens`` is the number of all tokens."""
        count = self.key.size(2)
        last = needed.last
        if last is None or (self.places is None and count <= last):
            return self
        if needed.first is None and self.places is None:
            # Cloned, because a slice would keep the whole tensor in memory.
            return self._map(lambda x: x[:, :, count - last :].clone(), None)
        places = torch.arange(tokens - count, tokens) if self.places is None else self.places
        stays = places >= tokens - last
        if needed.first is not None:
            stays = stays | torch.isin(places, needed.first)
        places = places[stays]
        index = stays.nonzero()[:, 0].to(self.key.device)
        without_gap = not len(places) or int(places[0]) == tokens - len(places)
        return self._map(lambda x: x.index_select(2, index), None if without_gap else places)

    def with_gaps(self, queries: int, tokens: int) -> Kept:
        """Insert T - 1 keys of zeros at the beginning of each gap; no query sees them.

        With T = 3, keys at the places ``ab...fgh`` become ``ab00fgh``. Tables by distance need
        these places (see :meth:`~fairseq_posenc.encodings.terms.Terms.select_keys`).

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

        return self._map(spread, places)

    def _map(self, change: Callable[[Tensor], Tensor], places: Tensor | None) -> Kept:
        """Change keys, values and decay in the same way."""
        decay = None if self.decay is None else change(self.decay)
        return Kept(change(self.key), change(self.value), decay, places)


class KeyValueCache(Protocol):
    """The interface of a layer's cache, whose format depends on the host; keys are rotated."""

    def past_decay(self, key: Tensor) -> Tensor | None:
        """Read the decay of the kept tokens, ``(B, G, K, 2)``; None without forget gates.

        Args:
            key: keys of the new tokens, ``(B, H, T, D)``; a host that stores the decay in wider
                keys finds it behind this width.
        """

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
    """Keys and values of one layer, for decoding step by step; empty before the first step.

    Args:
        state: dictionary that holds them; by default a new one.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        # `key` (rotated) and `value`, both (B, H, K, D). Self-attention adds the other fields of
        # `Kept`, `tokens`, the number of tokens read, and `ids`, (B, S), the positions that a
        # caller gave them; attention to a source adds `source`.
        self.state = {} if state is None else state

    @classmethod
    def wrap(cls, cache: Cache | dict[str, Any] | None) -> Cache | None:
        """Make a cache of a dictionary, which is its state; return a cache as it is."""
        if cache is not None and not isinstance(cache, (Cache, dict)):
            raise UserError(
                f"cache must be a Cache, one for each layer, not {type(cache).__name__}"
            )
        return cls(cache) if isinstance(cache, dict) else cache

    def __bool__(self) -> bool:
        return bool(self.state)

    @property
    def tokens(self) -> int:
        """The number of tokens read, including those whose keys were dropped."""
        return self.state.get("tokens", 0)

    @property
    def ids(self) -> Tensor | None:
        """The positions that a caller gave to all tokens that were read, ``(B, S)``, or None."""
        return self.state.get("ids")

    def list_places(self) -> Tensor:
        """List the places of the kept keys among all tokens, int64 ``(K,)``."""
        places: Tensor | None = self.state.get("places")
        if places is None:
            places = torch.arange(self.tokens - self.state["key"].size(2), self.tokens)
        return places

    def past_decay(self, key: Tensor) -> Tensor | None:
        """See :class:`KeyValueCache`."""
        return self.state.get("decay")

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """See :class:`KeyValueCache`.

        Raises:
            UserError: the cache has decays of forget gates and this layer has none, or vice versa.
        """
        if self.state and ("decay" in self.state) != (decay is not None):
            raise UserError("the cache is of a layer with other encodings: give each its own")
        tokens = self.tokens + key.size(2)
        visible = Kept(key, value, decay)
        if self.state:
            past = Kept(self.state["key"], self.state["value"], None, self.state.get("places"))
            visible = past.append(key, value, decay, tokens)
        stored = visible.select(needed, tokens)._asdict()
        self.state.clear()  # in place, as it may be the caller's dictionary
        self.state.update({name: x for name, x in stored.items() if x is not None}, tokens=tokens)
        return visible

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the batch, ``(new batch,)``, as beam search does after each step."""
        for name, kept in self.state.items():
            if isinstance(kept, Tensor) and name != "places":  # the same in all rows
                self.state[name] = kept.index_select(0, rows)
