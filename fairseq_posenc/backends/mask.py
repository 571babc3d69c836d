"""The keys that a query may see: directions, padding, windows and documents, as one mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import NamedTuple, Optional, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.forward_cache import PerForwardCache, is_exporting
from fairseq_posenc.encodings.locality import Locality

DIRECTIONS = ("both", "lr", "rl")
_T = TypeVar("_T")


class Mask(NamedTuple):
    """Which keys a query may see.

    Source: DecBERT, arXiv:2204.08688, for layers with a direction. The diagonal is never masked
    by a direction.
    """

    # `both`; `lr`, keys up to the query (causal); `rl`, keys from the query on
    direction: str = "both"
    key_padding: Tensor | None = None  # `(B, S)` of bool, True for padding, or None
    pairs: Tensor | None = None  # `(T, S)` of bool, True where a query must not see a key, or None
    cache: Optional[PerForwardCache] = None  # the forward pass's cache; None outside of one
    locality: Locality = Locality()  # limits of the keys

    @property
    def may_hide_all(self) -> bool:
        """Whether a query may see no key: a direction alone leaves each its own."""
        return self.key_padding is not None or self.pairs is not None

    @property
    def key_parts(self) -> tuple[object, ...]:
        """All that hides keys, for the keys of the forward pass's cache."""
        return (self.direction, self.key_padding, self.pairs, *self.locality)

    def forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine all masks: True hides a key, ``(B or 1, 1, T or 1, S)``; None hides none."""
        deps = (*self.key_parts, tgt_len, src_len, device)
        return self.cached("forbidden", deps, lambda: self._combine(tgt_len, src_len, device))

    def without_needless_window(self, src_len: int) -> Mask:
        """Drop a window that reaches over all keys: plain attention may be faster.

        A graph that is exported serves all lengths, and keeps it.
        """
        reach = self.locality.reach(self.direction)
        if reach is None or is_exporting() or reach < src_len - 1:
            return self
        return self._replace(locality=self.locality._replace(window=None, first_keys=None))

    def without_dropped_keys(self, count: int) -> Mask:
        """Leave out the first keys, of which a cache has dropped ``count``."""
        if not count:
            return self
        # Not a slice: torch.compile makes a constant of a slice's start, a graph for each step.
        return self._map_keys(lambda x: x.narrow(1, count, x.size(1) - count))

    def select_keys(self, places: Tensor) -> Mask:
        """Leave out all keys but those at ``places``, which end with those of the queries."""
        return self._map_keys(lambda x: x[:, places])

    def _map_keys(self, select: Callable[[Tensor], Tensor]) -> Mask:
        """Select keys in the second dimension of all masks."""

        def rest(x: Tensor | None) -> Tensor | None:
            return None if x is None else select(x)

        segments, first_keys = map(rest, (self.locality.segments, self.locality.first_keys))
        locality = self.locality._replace(segments=segments, first_keys=first_keys)
        return Mask(self.direction, rest(self.key_padding), rest(self.pairs), None, locality)

    def hides_distances(self, distances: Tensor) -> Tensor:
        """Check which signed distances from a query to a key are hidden; bool of their shape.

        :attr:`Locality.first_keys`, which no window hides, are the caller's to exempt.
        """
        reach = self.locality.reach(self.direction)
        hidden = torch.zeros_like(distances, dtype=torch.bool)
        if self.direction != "both":
            hidden = distances > 0 if self.direction == "lr" else distances < 0
        return hidden if reach is None else hidden | (distances.abs() > reach)

    def visible_ranges(
        self, tgt_len: int, src_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the first and last key that each query may see, ``(B or 1, T)`` each.

        Padding is ignored. None where the visible keys may not be a single range: with first keys;
        with segments whose numbers do not ascend; in a graph, which cannot look, with any segments.
        """
        if self.locality.first_keys is not None:
            return None
        here = torch.arange(src_len - tgt_len, src_len, device=device).unsqueeze(0)  # [1, T]
        low, high = torch.zeros_like(here), torch.full_like(here, src_len - 1)
        if (reach := self.locality.reach(self.direction)) is not None:
            low, high = (here - reach).clamp(min=0), (here + reach).clamp(max=src_len - 1)
        if (segments := self.locality.segments) is not None:
            if torch.compiler.is_compiling() or bool((segments.diff(dim=1) < 0).any()):
                return None
            ours = segments[:, src_len - tgt_len :].contiguous()
            low = torch.maximum(low, torch.searchsorted(segments.contiguous(), ours))
            last = torch.searchsorted(segments.contiguous(), ours, right=True) - 1
            high = torch.minimum(high, last)
        if self.direction == "lr":
            high = high.minimum(here)
        elif self.direction == "rl":
            low = low.maximum(here)
        return low, high

    def first_key_ranges(
        self, tgt_len: int, src_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the first and last of :attr:`Locality.first_keys` that each query may see.

        ``(B or 1, T)`` each, the first one after the last one for a query that sees none of them.
        None where :meth:`visible_ranges` cannot tell the keys of a segment.
        """
        first_keys = self.locality.first_keys
        assert first_keys is not None
        locality = self.locality._replace(window=None, first_keys=None)
        ranges = self._replace(locality=locality).visible_ranges(tgt_len, src_len, device)
        if ranges is None:
            return None
        keys = torch.arange(src_len, device=device)
        later = torch.where(first_keys, keys, src_len).flip(1).cummin(1).values.flip(1)
        earlier = torch.where(first_keys, keys, -1).cummax(1).values  # [B or 1, S]
        rows = max(len(first_keys), len(ranges[0]))
        later, earlier, low, high = (x.expand(rows, -1) for x in (later, earlier, *ranges))
        return later.gather(1, low), earlier.gather(1, high)

    def count_visible(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """Count the keys that each query may see, ``(B or 1, T)``."""
        deps = (*self.key_parts, tgt_len, src_len, device)
        return self.cached("visible", deps, lambda: self._count(tgt_len, src_len, device))

    def cached(self, key: str, deps: tuple[object, ...], compute: Callable[[], _T]) -> _T:
        """Compute a value once for a forward pass; see :meth:`PerForwardCache.get`."""
        return compute() if self.cache is None else self.cache.get(key, deps, compute)

    def _count(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """Count the keys in each query's range, and the first keys outside of it."""
        first_keys = self.locality.first_keys
        near = self._replace(locality=self.locality._replace(first_keys=None))
        ranges = near.visible_ranges(tgt_len, src_len, device)
        if self.pairs is not None or ranges is None:
            forbidden = self.forbidden(tgt_len, src_len, device)
            assert forbidden is not None
            return (~forbidden).sum(-1)[:, 0].expand(-1, tgt_len)
        padding = self.key_padding
        if padding is None and first_keys is None:
            return ranges[1] - ranges[0] + 1
        if padding is None:
            padding = torch.zeros(1, src_len, dtype=torch.bool, device=device)
        counts = _count_marked(~padding, *ranges)
        if first_keys is None:
            return counts
        wide = near._replace(locality=near.locality._replace(window=None))
        all_ranges = wide.visible_ranges(tgt_len, src_len, device)
        assert all_ranges is not None, "a window only narrows them"
        first_keys = first_keys & ~padding
        return counts + _count_marked(first_keys, *all_ranges) - _count_marked(first_keys, *ranges)

    def _combine(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        parts = []
        if (
            self.direction == "rl"
            or (self.direction == "lr" and tgt_len > 1)
            or self.locality.window is not None
        ):
            distances = torch.arange(src_len, device=device) - torch.arange(
                src_len - tgt_len, src_len, device=device
            ).unsqueeze(1)  # [T, S]
            hidden = self.hides_distances(distances)
            if (first_keys := self.locality.first_keys) is not None:
                by_direction = self._replace(locality=Locality()).hides_distances(distances)
                # [B or 1, 1, T, S]
                hidden = by_direction | (hidden & ~first_keys[:, None, None])
            parts.append(hidden)
        if (segments := self.locality.segments) is not None:
            ours = segments[:, src_len - tgt_len :, None]  # [B or 1, T, 1]
            parts.append(ours.ne(segments[:, None])[:, None])  # [B or 1, 1, T, S]
        if self.pairs is not None:
            parts.append(self.pairs)
        if self.key_padding is not None:
            parts.append(self.key_padding[:, None, None, :])  # [B, 1, 1, S]
        if not parts:
            return None
        forbidden = reduce(or_, parts)
        return forbidden if forbidden.dim() == 4 else forbidden[None, None]  # [1, 1, T, S]


def _count_marked(marks: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Count the marks, ``(B or 1, S)`` of bool, from ``low`` to ``high``, ``(B or 1, T)``."""
    (rows,) = torch.broadcast_shapes(marks.shape[:1], low.shape[:1])
    before = F.pad(marks.cumsum(1), (1, 0)).expand(rows, -1)  # [B or 1, S + 1]
    return before.gather(1, high.expand(rows, -1) + 1) - before.gather(1, low.expand(rows, -1))
