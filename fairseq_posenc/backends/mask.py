"""The keys that a query may see: directions, padding, windows and documents, as one mask.

In masks of bool, True hides a key. B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.forward_cache import PerForwardCache, is_exporting
from fairseq_posenc.encodings.locality import Locality

DIRECTIONS = ("both", "lr", "rl")
_T = TypeVar("_T")


class Mask(NamedTuple):
    """Which keys a query may see. The T queries are the last T of the S tokens.

    Source: DecBERT, arXiv:2204.08688, for layers with a direction. The diagonal is never masked
    by a direction, a window or segments.
    """

    direction: str = "both"  # `lr`, keys up to the query (causal); `rl`, keys from the query on
    key_padding: Tensor | None = None  # `(B, S)` of bool, True for padding
    pairs: Tensor | None = None  # `(T, S)` of bool, True where a query must not see a key
    cache: PerForwardCache | None = None  # the forward pass's cache; None outside of one
    locality: Locality = Locality()  # a window, first keys, which no window hides, and segments

    @property
    def may_hide_all(self) -> bool:
        """Whether a query can be left without any key: only padding and pairs hide its own key."""
        return self.key_padding is not None or self.pairs is not None

    @property
    def cache_deps(self) -> tuple[object, ...]:
        """All that hides keys: a cached result is valid as long as these objects are the same."""
        return (self.direction, self.key_padding, self.pairs, *self.locality)

    def hides(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Check whether a query may not see a key, by their indices among the S tokens.

        This is the mask's definition. Backends find the hidden keys of all queries faster.

        Args:
            query_at: int64 ``(M, 1)``.
            key_at: int64 ``(1, W)``.

        Returns:
            ``(B or 1, M, W)`` of bool.
        """
        first_keys, segments = self.locality.first_keys, self.locality.segments
        exempt = None if first_keys is None else first_keys[:, key_at]  # [B or 1, 1, W]
        hidden = self.mark_hidden(key_at - query_at, exempt)
        if segments is not None:
            hidden = hidden | segments[:, query_at].ne(segments[:, key_at])
        if self.key_padding is not None:
            hidden = hidden | self.key_padding[:, key_at]
        if self.pairs is not None:  # which has a row for each of the last T tokens
            past = self.pairs.size(1) - self.pairs.size(0)
            hidden = hidden | self.pairs[query_at - past, key_at]
        return hidden if hidden.dim() == 3 else hidden[None]

    def forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine all masks: True hides a key, ``(B or 1, 1, T or 1, S)``; None hides none."""
        deps = (*self.cache_deps, tgt_len, src_len, device)
        return self.cached("forbidden", deps, lambda: self._combine_parts(tgt_len, src_len, device))

    def without_needless_window(self, src_len: int) -> Mask:
        """Drop a window that reaches over all keys: plain attention may be faster.

        An exported graph serves all lengths, so there the window stays.
        """
        reach = self.locality.reach(self.direction)  # the largest visible distance; None: no limit
        if reach is None or is_exporting() or reach < src_len - 1:
            return self
        return self._replace(locality=self.locality._replace(window=None, first_keys=None))

    def without_dropped_keys(self, count: int) -> Mask:
        """Leave out the first ``count`` keys, which a cache has dropped."""
        # Not a slice: torch.compile would compile a graph for each start of a slice.
        return self._map(lambda x: x.narrow(1, count, x.size(1) - count))

    def select_keys(self, places: Tensor) -> Mask:
        """Keep the keys at ``places``, the last T the queries'; a window must hide all others."""
        return self._map(lambda x: x[:, places])

    def select_sentences(self, places: slice) -> Mask:
        """Keep only some sentences of the batch."""
        selected = self._map(lambda x: x if len(x) == 1 else x[places])
        return selected._replace(pairs=self.pairs)  # which all sentences share

    def _map(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """Change the tensors, ``(B or 1, S)`` and ``(T, S)``; the new ones are in no cache."""
        tensors = (self.key_padding, self.pairs, self.locality.segments, self.locality.first_keys)
        padding, pairs, segments, first_keys = (None if x is None else change(x) for x in tensors)
        locality = self.locality._replace(segments=segments, first_keys=first_keys)
        return Mask(self.direction, padding, pairs, cache=None, locality=locality)

    def mark_hidden(self, distances: Tensor, first_keys: Tensor | None = None) -> Tensor:
        """Mark the distances, key minus query, that a direction or a window hides.

        Args:
            distances: of any shape.
            first_keys: True where the key is one of :attr:`Locality.first_keys`, which no window
                hides; by default, none is.
        """
        reach = self.locality.reach(self.direction)
        if self.direction == "lr":
            hidden = distances > 0
        elif self.direction == "rl":
            hidden = distances < 0
        else:
            hidden = torch.zeros_like(distances, dtype=torch.bool)
        if reach is None:
            return hidden
        too_far = distances.abs() > reach
        return hidden | (too_far if first_keys is None else too_far & ~first_keys)

    def find_visible_ranges(
        self, tgt_len: int, src_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Find the first and last key that each query may see, ``(B or 1, T)`` each.

        Padding and pairs are ignored. The result is None if the visible keys need not be one range:
        with first keys, or with segments whose numbers do not ascend. While ``torch.compile``
        traces, the numbers cannot be read, so any segments give None.
        """
        if self.locality.first_keys is not None:
            return None
        queries = torch.arange(src_len - tgt_len, src_len, device=device).unsqueeze(0)  # [1, T]
        low = torch.zeros_like(queries)
        high = torch.full_like(queries, src_len - 1)
        if (reach := self.locality.reach(self.direction)) is not None:
            low = (queries - reach).clamp(min=0)
            high = (queries + reach).clamp(max=src_len - 1)
        if (segments := self.locality.segments) is not None:
            if torch.compiler.is_compiling() or bool((segments.diff(dim=1) < 0).any()):
                return None
            segments = segments.contiguous()  # other tensors are copied, with a warning
            query_segments = segments[:, src_len - tgt_len :].contiguous()
            low = torch.maximum(low, torch.searchsorted(segments, query_segments))
            last = torch.searchsorted(segments, query_segments, right=True) - 1
            high = torch.minimum(high, last)
        if self.direction == "lr":
            high = high.minimum(queries)
        elif self.direction == "rl":
            low = low.maximum(queries)
        return low, high

    def count_visible(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """Count the keys that each query may see, ``(B or 1, T)``."""
        deps = (*self.cache_deps, tgt_len, src_len, device)
        return self.cached("visible", deps, lambda: self._count_uncached(tgt_len, src_len, device))

    def cached(self, name: str, deps: tuple[object, ...], compute: Callable[[], _T]) -> _T:
        """Compute a value once for a forward pass, and again for other objects in ``deps``."""
        return compute() if self.cache is None else self.cache.get(name, deps, compute)

    def _count_uncached(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """Count the keys in each query's range; without ranges, count all pairs."""
        ranges = self.find_visible_ranges(tgt_len, src_len, device)
        if self.pairs is not None or ranges is None:
            forbidden = self.forbidden(tgt_len, src_len, device)
            assert forbidden is not None, "pairs, segments and windows hide keys"
            return (~forbidden).sum(-1)[:, 0].expand(-1, tgt_len)
        low, high = ranges
        if self.key_padding is None:
            return high - low + 1
        before = F.pad((~self.key_padding).cumsum(1), (1, 0))  # tokens before each key, [B, S + 1]
        sentences = max(len(before), len(low))
        before, low, high = (x.expand(sentences, -1) for x in (before, low, high))
        return before.gather(1, high + 1) - before.gather(1, low)

    def _combine_parts(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine everything that hides keys; see :meth:`forbidden`."""
        # With `lr`, a single query is the last token, and sees all keys.
        directed = self.direction == "rl" or (self.direction == "lr" and tgt_len > 1)
        if not directed and not self.locality.limits and self.pairs is None:
            padding = self.key_padding
            return None if padding is None else padding[:, None, None, :]  # [B, 1, 1, S]
        keys = torch.arange(src_len, device=device)
        queries = keys[src_len - tgt_len :, None]
        return self.hides(queries, keys[None]).unsqueeze(1)  # [B or 1, 1, T, S]


NO_MASK = Mask()  # every query may see every key
