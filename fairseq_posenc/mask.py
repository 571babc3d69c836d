"""The keys that a query may see: directions, padding, windows and documents, as one mask.

In masks of bool, True hides a key. B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.errors import UserError
from fairseq_posenc.torch_modes import has_saving_hooks

DIRECTIONS = ("both", "lr", "rl")
_T = TypeVar("_T")


class PassCache:
    """Holds values of `Mask.cached` as attributes; accelerate would copy a dict for each layer."""


class NeededKeys(NamedTuple):
    """The keys that a cache must hold for later tokens; a first key may be among the last ones."""

    last: int | None  # number of last keys; None for all
    first: Tensor | None = None  # indices in `Mask.first_keys`, int64 `(n,)` on the CPU


class Mask(NamedTuple):
    """Which keys a query may see. The T queries are the last T of the S tokens.

    Encodings limit the keys (:meth:`~fairseq_posenc.encodings.base.Encoding.mask`) by the fields
    from ``window`` on; layers add a direction and padding. The diagonal is never masked by a
    direction, a window or segments.

    >>> Mask("lr", window=4).reach, Mask("both", window=4).reach  # distance of the farthest key
    (3, 2)

    Source: DecBERT, arXiv:2204.08688, for layers with a direction.

    Attributes:
        direction: ``lr``, keys up to the query (causal); ``rl``, keys from the query on; ``both``.
        key_padding: ``(B, S)`` of bool, True for padding.
        pairs: ``(T, S)`` of bool, True where a query must not see a key.
        cache: values that the first layer of a forward pass computes for all (:meth:`cached`), by
            their names and by what they depend on; None outside of a pass.
        window: W. A query with a direction sees W keys, including its own; a query without one
            sees keys at most W // 2 away. None for no limit.
        segments: the number of each token's segment (chunk, document), ``(B or 1, S)`` of int64; a
            query sees the keys of its segment. None for no limit.
        documents: whether segments are documents, or parts of them. A reset (table rows for the
            first token alone) then serves the first token of each segment.
        longest_segment: the largest number of tokens in a segment, if it is known.
        first_keys: ``(B or 1, S)`` of bool, True for keys that no window hides. None for none.
        prefill: whether later tokens, generated one by one, have no window.
    """

    direction: str = "both"
    key_padding: Tensor | None = None
    pairs: Tensor | None = None
    cache: PassCache | None = None
    window: int | None = None
    segments: Tensor | None = None
    documents: bool = False
    longest_segment: int | None = None
    first_keys: Tensor | None = None
    prefill: bool = False

    @property
    def has_limits(self) -> bool:
        """Whether a window or segments may hide keys that the direction allows."""
        return self.window is not None or self.segments is not None

    @property
    def reach(self) -> int | None:
        """The largest distance to a visible key; None for no limit."""
        if self.window is None:
            return None
        return self.window // 2 if self.direction == "both" else self.window - 1

    @property
    def may_hide_all(self) -> bool:
        """Whether a query can be left without any key: only padding and pairs hide its own key."""
        return self.key_padding is not None or self.pairs is not None

    @property
    def cache_deps(self) -> tuple[object, ...]:
        """All that hides keys: a cached result is valid as long as these objects are the same."""
        return tuple(self._replace(cache=None))

    def hides(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Check whether a query may not see a key, by their indices among the S tokens.

        This is the mask's definition; backends also call it for parts of the pairs.

        Args:
            query_at: int64 ``(M, 1)``, of any M queries.
            key_at: int64 ``(1, N)``, of any N keys.

        Returns:
            ``(B or 1, M, N)`` of bool.
        """
        segments, first_keys = self.segments, self.first_keys
        exempt = None if first_keys is None else first_keys[:, key_at]  # [B or 1, 1, N]
        hidden = self.mark_hidden(key_at - query_at, exempt)
        if segments is not None:
            hidden = hidden | segments[:, query_at].ne(segments[:, key_at])
        if self.key_padding is not None:
            hidden = hidden | self.key_padding[:, key_at]
        if self.pairs is not None:  # which has a row for each of the last T tokens
            past = self.pairs.size(1) - self.pairs.size(0)
            hidden = hidden | self.pairs[query_at - past, key_at]
        return hidden if hidden.dim() == 3 else hidden[None]

    def with_direction(self, direction: str) -> Mask:
        """Set the direction; refuse an unknown one."""
        if direction not in DIRECTIONS:
            raise UserError(f"unknown direction {direction!r}: choose {', '.join(DIRECTIONS)}")
        return self._replace(direction=direction)

    def forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine all masks: True hides a key, ``(B or 1, 1, T or 1, S)``; None for no mask."""
        deps = (*self.cache_deps, tgt_len, src_len, device)
        return self.cached("forbidden", deps, lambda: self._combine_parts(tgt_len, src_len, device))

    def without_needless_window(self, src_len: int) -> Mask:
        """Drop a window that reaches over all keys: plain attention may be faster."""
        if self.reach is None or self.reach < src_len - 1:
            return self
        return self._replace(window=None, first_keys=None)

    def without_dropped_keys(self, count: int) -> Mask:
        """Leave out the first ``count`` keys, which a cache has dropped."""
        # Not a slice: torch.compile would compile a graph for each start of a slice.
        return self._map(lambda x: x.narrow(1, count, x.size(1) - count))

    def select_keys(self, places: Tensor) -> Mask:
        """Keep the keys at ``places``, int64 ``(K,)``, which include the last T.

        The window hid the others anyway; it now counts distances among the keys that are left.
        """
        return self._map(lambda x: x[:, places])

    def select_sentences(self, sentences: slice) -> Mask:
        """Keep only some sentences of the batch."""
        selected = self._replace(pairs=None)._map(lambda x: x if len(x) == 1 else x[sentences])
        return selected._replace(pairs=self.pairs)  # `(T, S)`: all sentences share them

    def _map(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """Change the tensors, ``(B or 1, S)`` and ``(T, S)``; the new ones are in no cache."""
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        changed: dict[str, Any] = {name: change(x) for name, x in tensors.items()}
        return self._replace(**changed, cache=None)

    def mark_hidden(self, distances: Tensor, first_keys: Tensor | None = None) -> Tensor:
        """Mark the distances, key minus query, that a direction or a window hides.

        Args:
            distances: of any shape.
            first_keys: True where the key is one of the mask's ``first_keys``, which no window
                hides; by default, none is.
        """
        reach = self.reach
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
        if self.first_keys is not None:
            return None
        queries = torch.arange(src_len - tgt_len, src_len, device=device).unsqueeze(0)  # [1, T]
        low = torch.zeros_like(queries)
        high = torch.full_like(queries, src_len - 1)
        if (reach := self.reach) is not None:
            low = (queries - reach).clamp(min=0)
            high = (queries + reach).clamp(max=src_len - 1)
        if (segments := self.segments) is not None:
            if torch.compiler.is_compiling() or bool((segments.diff(dim=1) < 0).any()):
                return None
            segments = segments.contiguous()  # `searchsorted` copies others, with a warning
            query_segments = segments[:, src_len - tgt_len :].contiguous()
            low = torch.maximum(low, torch.searchsorted(segments, query_segments))
            high = torch.minimum(high, torch.searchsorted(segments, query_segments, right=True) - 1)
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
        """Compute a value once for a forward pass, and again for other objects in ``deps``.

        The cache holds the latest value of each name, with references to what it depends on: while
        they live, no new tensor can get their ``id``.

        Args:
            name: name of the value.
            deps: values that the result depends on. Tensors are compared by identity, as torch
                hashes them: a layer that runs again in the backward pass gets new ones.
            compute: computes the value.
        """
        learns = torch.is_grad_enabled()
        records = learns and any(isinstance(x, Tensor) and x.requires_grad for x in deps)
        # A compiler finds common subexpressions itself. Activation checkpointing expects a layer to
        # save the same tensors when it runs again: each layer computes what has a gradient itself.
        if torch.compiler.is_compiling() or self.cache is None or (records and has_saving_hooks()):
            return compute()
        # With gradients enabled, a value that was computed without a graph does not serve.
        key, values = (learns, *deps), vars(self.cache)
        if key not in values.get(name, {}):
            values[name] = {key: compute()}
        return cast(_T, values[name][key])

    def needed_keys(self, new_tokens: int = 0) -> NeededKeys:
        """Find the keys that a cache must hold for the next tokens of a causal model.

        With ``window(size=4,first=1)`` these are the last 3 keys and key 0. A compiled graph cannot
        read how many first keys there are, so with these it needs all keys.

        Args:
            new_tokens: number of new tokens, whose keys the cache does not hold yet; they are the
                last ones in ``first_keys`` and ``segments``.
        """
        if self.prefill:  # the next tokens are generated, and have no window
            return Mask(longest_segment=self.longest_segment).needed_keys()
        sizes = [size for size in (self.window, self.longest_segment) if size is not None]
        # Less a query's own key, which is new; but at least 1, so that no cache is without keys.
        last = max(min(sizes) - 1, 1) if sizes else None
        if self.first_keys is None or last is None:
            return NeededKeys(last)
        if torch.compiler.is_compiling():
            return NeededKeys(last=None)
        held = self.first_keys.size(1) - new_tokens
        is_first = self.first_keys[:, :held]  # [B or 1, held]
        if self.segments is not None:
            # An unknown token continues the last segment, or begins one without these keys.
            open_segments = self.segments[:, -max(new_tokens, 1) :]  # [B or 1, new_tokens or 1]
            is_open = self.segments[:, :held, None].eq(open_segments[:, None])
            is_first = is_first & is_open.any(2)
        return NeededKeys(last, is_first.any(0).nonzero()[:, 0].cpu())

    def __and__(self, other: Mask) -> Mask:
        """Combine the limits of two encodings: a key is visible if both allow it.

        Specs refuse two windows if one has first keys. The other fields are those of ``self``.
        """
        segments = other.segments if self.segments is None else self.segments
        if self.segments is not None and other.segments is not None:
            # One number for each pair of their segments.
            segments = self.segments * (other.segments.amax() + 1) + other.segments
        return self._replace(
            window=_smaller(self.window, other.window),
            segments=segments,
            documents=self.documents or other.documents,
            longest_segment=_smaller(self.longest_segment, other.longest_segment),
            first_keys=other.first_keys if self.first_keys is None else self.first_keys,
            prefill=self.prefill or other.prefill,
        )

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
        sentences = max(before.size(0), low.size(0))  # not `len`, which would fix it in a graph
        before, low, high = (x.expand(sentences, -1) for x in (before, low, high))
        return before.gather(1, high + 1) - before.gather(1, low)

    def _combine_parts(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine everything that hides keys; see :meth:`forbidden`."""
        # With `lr`, a single query is the last token, and sees all keys.
        directed = self.direction == "rl" or (self.direction == "lr" and tgt_len > 1)
        if not directed and not self.has_limits and self.pairs is None:
            padding = self.key_padding
            return None if padding is None else padding[:, None, None, :]  # [B, 1, 1, S]
        keys = torch.arange(src_len, device=device)
        queries = keys[src_len - tgt_len :, None]
        return self.hides(queries, keys[None]).unsqueeze(1)  # [B or 1, 1, T, S]


def _smaller(limit: int | None, other: int | None) -> int | None:
    """Return the smaller of two limits; None means no limit."""
    return limit if other is None or (limit is not None and limit < other) else other


NO_MASK = Mask()  # every query may see every key
