"""Keeps keys and values of earlier tokens, for decoding step by step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError


class KeyValueCache(Protocol):
    """The interface of a layer's cache, whose format depends on the host; keys are rotated."""

    def past_decay(self, key: Tensor) -> Tensor | None:
        """Read the decay of earlier tokens, ``(B, G, S - T, 2)``; None without forget gates.

        Args:
            key: keys of the new tokens, ``(B, H, T, D)``.
        """

    def extend(
        self, key: Tensor, value: Tensor, decay: Tensor | None, needed: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys and values of new tokens to those of earlier tokens.

        Args:
            key: rotated keys of the new tokens, ``(B, H, T, D)``.
            value: their values, ``(B, H, T, D)``.
            decay: decay of all tokens, ``(B, G, S, 2)``.
            needed: number of keys that queries of later steps may see, None for all; older keys
                are dropped.

        Returns:
            Keys and values that the new queries may see, ``(B, H, S, D)``, and the decay of all
            tokens.
        """


class Cache:
    """Keys and values of one layer, for decoding step by step; empty before the first step.

    Args:
        state: dictionary that holds them; by default a new one.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        # `key` (rotated) and `value`, both (B, H, S, D). Self-attention adds `tokens`, the number
        # of tokens read, and `decay`, (B, G, S, 2); attention to a source adds `source`.
        self.state = {} if state is None else state

    @classmethod
    def wrap(cls, cache: Cache | dict[str, Any] | None) -> Cache | None:
        """Make a cache of a dictionary, which is its state; return a cache as it is."""
        return cls(cache) if isinstance(cache, dict) else cache

    def __bool__(self) -> bool:
        return bool(self.state)

    @property
    def tokens(self) -> int:
        """The number of tokens read, including those whose keys were dropped."""
        return self.state.get("tokens", 0)

    def past_decay(self, key: Tensor) -> Tensor | None:
        """See :class:`KeyValueCache`."""
        return self.state.get("decay")

    def extend(
        self, key: Tensor, value: Tensor, decay: Tensor | None, needed: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`KeyValueCache`.

        Raises:
            UserError: the cache has decays of forget gates and this layer has none, or vice versa.
        """
        if self.state and ("decay" in self.state) != (decay is not None):
            raise UserError("the cache is of a layer with other encodings: give each its own")
        tokens = self.tokens + key.size(2)
        if self.state:
            key = torch.cat([self.state["key"], key], dim=2)  # [B, H, S, D]
            value = torch.cat([self.state["value"], value], dim=2)
        first = 0 if needed is None else max(key.size(2) - needed, 0)
        # Cloned, because a slice would keep the whole tensor in memory.
        kept = [x[:, :, first:].clone() if first else x for x in (key, value)]
        self.state.update(key=kept[0], value=kept[1], tokens=tokens)
        if decay is not None:
            self.state["decay"] = decay[:, :, -kept[0].size(2) :]
        return key, value, decay

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the batch, ``(new batch,)``, as beam search does after each step."""
        for name, kept in self.state.items():
            if isinstance(kept, Tensor):
                self.state[name] = kept.index_select(0, rows)
