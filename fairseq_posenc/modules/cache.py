"""Keys and values of earlier tokens, for decoding step by step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError


class KeyValueCache(Protocol):
    """What a layer keeps of earlier tokens, in the format of a host. Keys are kept rotated."""

    def past_decay(self, key: Tensor) -> Tensor | None:
        """Read the decay of earlier tokens, ``(B, G, S - T, 2)``; None where there are no gates.

        Args:
            key: of the new tokens, ``(B, H, T, D)``.
        """

    def extend(
        self, key: Tensor, value: Tensor, decay: Tensor | None, needed: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys and values of new tokens, ``(B, H, T, D)``, to those of earlier ones.

        Args:
            key: rotated.
            value: beside it.
            decay: of all tokens, ``(B, G, S, 2)``.
            needed: how many keys the queries of later steps may see; None for all. The others
                are not kept.

        Returns:
            Keys and values ``(B, H, S, D)`` that the new queries may see, and the decay of all
            tokens.
        """


class Cache:
    """Keys and values of one layer, for decoding step by step; empty before the first step.

    Args:
        state: a dictionary to keep them in.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        # `key` (rotated) and `value`, both (B, H, S, D); of self-attention `decay`, (B, G, S, 2),
        # and `tokens`, the number of all that were read; of attention to a source `source`.
        self.state = {} if state is None else state

    @classmethod
    def wrap(cls, cache: Cache | dict[str, Any] | None) -> Cache | None:
        """Take a cache as it is, and a dictionary as the state of one."""
        return cls(cache) if isinstance(cache, dict) else cache

    def __bool__(self) -> bool:
        return bool(self.state)

    @property
    def tokens(self) -> int:
        """The number of tokens that were read; keys that no later query sees are not kept."""
        return self.state.get("tokens", 0)

    def past_decay(self, key: Tensor) -> Tensor | None:
        """See :class:`KeyValueCache`."""
        return self.state.get("decay")

    def extend(
        self, key: Tensor, value: Tensor, decay: Tensor | None, needed: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`KeyValueCache`.

        Raises:
            UserError: the cache is of a layer with forget gates, and this one has none; or the
                other way round.
        """
        if self.state and ("decay" in self.state) != (decay is not None):
            raise UserError("the cache is of a layer with other encodings: give each its own")
        tokens = self.tokens + key.size(2)
        if self.state:
            key = torch.cat([self.state["key"], key], dim=2)  # [B, H, S, D]
            value = torch.cat([self.state["value"], value], dim=2)
        first = 0 if needed is None else max(key.size(2) - needed, 0)
        # A part of a tensor would keep the whole in memory.
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
