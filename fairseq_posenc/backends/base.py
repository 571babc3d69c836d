"""The interface of all backends: masks, the cache of a forward pass, and views by distance."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Optional, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.terms import Terms

DIRECTIONS = ("both", "lr", "rl")
_T = TypeVar("_T")


class PerForwardCache:
    """Cache of one forward pass: the first layer that asks computes a value, the others reuse it.

    For each key the latest value is kept.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[tuple[object, ...], Any]] = {}

    def get(self, key: str, deps: tuple[object, ...], compute: Callable[[], _T]) -> _T:
        """Look up a value, or compute it if a dependency has changed.

        Args:
            key: name of the value.
            deps: values that the result depends on. Tensors are compared by identity: a layer that
                is run again in the backward pass has others, with gradients of their own.
            compute: computes the value.
        """
        if torch.compiler.is_compiling():  # the compiler finds common subexpressions itself
            return compute()
        now = (torch.is_grad_enabled(), *deps)
        before, value = self._values.get(key, ((), None))
        if len(before) != len(now) or not all(map(_is_same, before, now)):
            value = compute()
            self._values[key] = now, value
        found: _T = value
        return found


def _is_same(ours: object, theirs: object) -> bool:
    tensors = isinstance(ours, Tensor) or isinstance(theirs, Tensor)
    return ours is theirs if tensors else ours == theirs


class Mask(NamedTuple):
    """Which keys a query may see.

    Attributes:
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
        key_padding: ``(B, S)`` of bool, True for padding, or None.
        pairs: ``(T, S)`` of bool, True where a query must not see a key, or None.
        cache: of the forward pass; None outside of one.
        locality: limits of the keys.

    Source: DecBERT, arXiv:2204.08688, for layers with a direction. The diagonal is never masked
    by a direction.
    """

    direction: str = "both"
    key_padding: Tensor | None = None
    pairs: Tensor | None = None
    cache: Optional[PerForwardCache] = None
    locality: Locality = Locality()

    @property
    def may_hide_all(self) -> bool:
        """Whether a query may see no key: a direction alone leaves each its own."""
        return self.key_padding is not None or self.pairs is not None

    def forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Combine all masks: True hides a key, ``(B or 1, 1, T or 1, S)``; None hides none."""
        deps = (*self[:3], *self.locality, tgt_len, src_len, device)
        return self.cached("forbidden", deps, lambda: self._combine(tgt_len, src_len, device))

    def without_needless_window(self, src_len: int) -> Mask:
        """Drop a window that reaches over all keys: plain attention may be faster."""
        reach = self.locality.reach(self.direction)
        if reach is None or reach < src_len - 1:
            return self
        return self._replace(locality=self.locality._replace(window=None))

    def without_first_keys(self, count: int) -> Mask:
        """Leave out the first keys, of which a cache has dropped ``count``."""
        if not count:
            return self

        def rest(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, count:]

        limits = self.locality._replace(segments=rest(self.locality.segments))
        return Mask(self.direction, rest(self.key_padding), rest(self.pairs), None, limits)

    def hides_distances(self, distances: Tensor) -> Tensor:
        """Check which signed distances from a query to a key are hidden; bool of their shape."""
        reach = self.locality.reach(self.direction)
        hidden = torch.zeros_like(distances, dtype=torch.bool)
        if self.direction != "both":
            hidden = distances > 0 if self.direction == "lr" else distances < 0
        return hidden if reach is None else hidden | (distances.abs() > reach)

    def visible_ranges(
        self, tgt_len: int, src_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the first and last key that each query may see, ``(B or 1, T)`` each.

        Padding is left out of account. None where a segment's tokens do not stand together.
        """
        here = torch.arange(src_len - tgt_len, src_len, device=device).unsqueeze(0)  # [1, T]
        low, high = torch.zeros_like(here), torch.full_like(here, src_len - 1)
        if (reach := self.locality.reach(self.direction)) is not None:
            low, high = (here - reach).clamp(min=0), (here + reach).clamp(max=src_len - 1)
        if (segments := self.locality.segments) is not None:
            if bool((segments.diff(dim=1) < 0).any()):
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

    def count_visible(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        """Count the keys that each query may see, ``(B or 1, T)``."""
        deps = (*self[:3], *self.locality, tgt_len, src_len, device)
        return self.cached("visible", deps, lambda: self._count(tgt_len, src_len, device))

    def cached(self, key: str, deps: tuple[object, ...], compute: Callable[[], _T]) -> _T:
        """Compute a value once for a forward pass; see :meth:`PerForwardCache.get`."""
        return compute() if self.cache is None else self.cache.get(key, deps, compute)

    def _count(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor:
        ranges = self.visible_ranges(tgt_len, src_len, device)
        if self.pairs is not None or ranges is None:
            forbidden = self.forbidden(tgt_len, src_len, device)
            assert forbidden is not None
            return (~forbidden).sum(-1)[:, 0].expand(-1, tgt_len)
        low, high = ranges
        if self.key_padding is None:
            return high - low + 1
        low, high = (each.expand(len(self.key_padding), -1) for each in ranges)  # [B, T]
        real_before = F.pad((~self.key_padding).cumsum(1), (1, 0))  # [B, S + 1]
        return real_before.gather(1, high + 1) - real_before.gather(1, low)

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
            parts.append(self.hides_distances(distances))
        if (segments := self.locality.segments) is not None:
            own = segments[:, src_len - tgt_len :, None]  # [B or 1, T, 1]
            parts.append(own.ne(segments[:, None])[:, None])  # [B or 1, 1, T, S]
        if self.pairs is not None:
            parts.append(self.pairs)
        if self.key_padding is not None:
            parts.append(self.key_padding[:, None, None, :])  # [B, 1, 1, S]
        if not parts:
            return None
        forbidden = reduce(or_, parts)
        return forbidden if forbidden.dim() == 4 else forbidden[None, None]  # [1, 1, T, S]


class CallFeatures(NamedTuple):
    """The features of a call that the choice of a backend depends on, beside the terms.

    Attributes:
        device: ``cpu``, ``cuda``.
        dtype: of queries, keys and values.
        tgt_len: T.
        src_len: S.
        head_dim: D.
        padded: whether a mask differs from sentence to sentence.
        limited: whether a window or segments hide keys.
        documents: whether each row has several documents, each with a first token.
        dropout: whether weights are dropped.
        learns: whether there will be a backward pass.
        need_weights: whether the weights are asked for.
        direction: see :class:`Mask`.
        lifted: whether queries and keys are wider than values.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    tgt_len: int = 512
    src_len: int = 512
    head_dim: int = 64
    padded: bool = False
    limited: bool = False
    documents: bool = False
    dropout: bool = False
    learns: bool = False
    need_weights: bool = False
    direction: str = "both"
    lifted: bool = False


class AttentionCall(NamedTuple):
    """The arguments of attention, for every backend.

    Attributes:
        query: ``(B, H, T, D)``, unscaled; the last T of S positions.
        key: ``(B, H, S, D)``.
        value: ``(B, H, S, D)``.
        terms: of the position encodings, added to the scores.
        mask: which keys a query may see. A query that may see none gets zeros.
        dropout: probability of dropping a weight; 0 outside training.
        need_weights: also return the weights before dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    terms: Terms
    mask: Mask = Mask()
    dropout: float = 0.0
    need_weights: bool = False

    def temperature(self) -> Tensor | None:
        """Compute the factor of all scores of each query, ``(B or 1, G, T)``, or None for 1."""
        terms, found = self.terms, self.terms.temperature
        if terms.log_visible is None:
            return found
        counts = self.mask.count_visible(self.query.size(2), self.key.size(2), self.query.device)
        # The factor of a single visible key is 0, and its weight 1 all the same.
        logarithms = counts.clamp(min=1).to(at_least_fp32(self.query).dtype).log()[:, None]
        by_count = at_least_fp32(terms.log_visible)[None, :, None] * logarithms
        return by_count if found is None else found * by_count

    def decay(self) -> tuple[Tensor | None, Tensor | None]:
        """Select the decay of earlier and of later keys, ``(B or 1, H, S)``, that a query sees.

        Where there is one, it holds for all pairs: a score gets c of its query less c of its key.
        """
        earlier, later = self.terms.decay, self.terms.later_decay
        if later is None or self.mask.direction == "lr":
            return earlier, None
        return (None if self.mask.direction == "rl" else earlier), -later

    @property
    def features(self) -> CallFeatures:
        """Features that the choice of a backend depends on."""
        return CallFeatures(
            self.query.device.type,
            self.query.dtype,
            self.query.size(2),
            self.key.size(2),
            self.query.size(3),
            self.mask.key_padding is not None,
            self.mask.locality.limits,
            self.mask.locality.documents,
            self.dropout > 0,
            torch.is_grad_enabled() and any(x.requires_grad for x in self[:3]),
            self.need_weights,
            self.mask.direction,
            self.query.size(3) != self.value.size(3),
        )


class Backend(Protocol):
    """A way to compute attention from queries, keys, values and terms."""

    def unavailable(self) -> str:
        """Explain why this backend cannot run on this machine; empty if it can."""

    def refuses(self, terms: Terms, call: CallFeatures) -> str:
        """Explain why this backend cannot compute such a call; empty if it can."""

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute attended values ``(B, H, T, D)`` and, if asked for, weights ``(B, H, T, S)``."""


def score_scale(terms: Terms, head_dim: int) -> float:
    """Compute the factor of the combined dot products, 1 / sqrt(c * D)."""
    factor = 1.0 if terms.scale_factor is None else terms.scale_factor
    return float((factor * head_dim) ** -0.5)


def expand_by_distance(
    table: Tensor, tgt_len: int, src_len: int, first: Tensor | None = None
) -> Tensor:
    """Look up a table's number for each query and key, ``(1 or B, G, T, S)``.

    Args:
        table: ``(G, R)``, for ``Span.from_lengths(tgt_len, src_len)``, and the reset's two rows.
        tgt_len: T.
        src_len: S.
        first: of :class:`~fairseq_posenc.encodings.terms.Terms`, for the reset.
    """
    if tgt_len == 1:
        pairs = table[:, None, :src_len]  # [G, 1, S]
    elif torch.compiler.is_compiling():  # which would compile `unfold` anew for each length
        pairs = relative_shift(table[None, :, None].expand(-1, -1, tgt_len, -1), src_len)[0]
    else:
        # The last query's rows are the table's first, those of the one before begin one later.
        pairs = table.unfold(1, src_len, 1)[:, :tgt_len].flip(1)  # [G, T, S]
    if first is None:
        return pairs[None]
    here, there = table[:, -2:, None, None].unbind(1)  # each [G, 1, 1]
    return insert_reset(pairs[None], here, there, first)


def relative_shift(products: Tensor, others: int) -> Tensor:
    """Shift products of n tokens with table rows to pairs, ``(B, H, n, others)``: a view.

    Transformer-XL's relative shift. The pairs of token i begin at row n-1-i, one row earlier than
    those of the token before. Read as a flat list whose rows are shorter by one, they all begin in
    one column: for n = 2, rows ``abc|def`` become ``bc|de`` (from n-1 on, R-1 wide).

    Args:
        products: ``(B, H, n, R)``.
        others: number of keys, or of queries where the tokens are keys.
    """
    tokens, rows = products.shape[2:]
    shifted = products.flatten(2)[..., tokens - 1 : tokens * rows - 1]  # [B, H, n * (R-1)]
    return shifted.unflatten(2, (tokens, rows - 1))[..., :others]  # [B, H, n, others]


def insert_reset(pairs: Tensor, here: Tensor | int, there: Tensor | int, first: Tensor) -> Tensor:
    """Replace the values of pairs with the first token by the reset's two.

    Args:
        pairs: ``(1 or B, G, T, S)``, or with one dimension more.
        here: value of pairs with the first token's query, as broad as needed.
        there: value of pairs with the first token's key, seen from any other query.
        first: see :class:`~fairseq_posenc.encodings.terms.Terms`.
    """
    more = [1] * (pairs.dim() - 4)
    queries = first[:, -pairs.size(2) :].reshape(first.size(0), 1, -1, 1, *more)  # [B, 1, T, 1]
    keys = first.reshape(first.size(0), 1, 1, -1, *more)  # [B, 1, 1, S]
    return torch.where(queries, here, torch.where(keys, there, pairs))
