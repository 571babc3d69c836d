"""What a backend is given: which pairs may attend, and the interface that all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Protocol, TypeVar

import torch
from torch import Tensor

from fairseq_posenc.encodings.terms import Terms

DIRECTIONS = ("both", "lr", "rl")
_T = TypeVar("_T")


class Once:
    """What all layers of a forward pass need alike: the first that asks for it makes it.

    Of each kind the last one is kept, as long as the forward pass is known.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[object, ...], Any]] = {}

    def made(self, kind: str, of: tuple[object, ...], make: Callable[[], _T]) -> _T:
        """Return what ``make`` returns, or what it returned to a layer before, of the same things.

        Args:
            kind: names it.
            of: all that it depends on. Tensors are the same only if they are one: a layer that is
                run again in the backward pass has others, with gradients of their own.
            make: makes it.
        """
        if torch.compiler.is_compiling():  # which sees for itself what is made twice
            return make()
        now = (torch.is_grad_enabled(), *of)
        before, found = self._made.get(kind, ((), None))
        if len(before) != len(now) or not all(map(_same, before, now)):
            found = make()
            self._made[kind] = now, found
        made: _T = found
        return made


def _same(ours: object, theirs: object) -> bool:
    tensors = isinstance(ours, Tensor) or isinstance(theirs, Tensor)
    return ours is theirs if tensors else ours == theirs


class Mask(NamedTuple):
    """Which keys a query may see.

    Attributes:
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
        key_padding: ``(B, S)`` of bool, True for padding, or None.
        pairs: ``(T, S)`` of bool, True where a query must not see a key, or None.
        once: of the forward pass; None outside of one.

    Source: DecBERT, arXiv:2204.08688, for layers with a direction. The diagonal is never masked
    by a direction.
    """

    direction: str = "both"
    key_padding: Tensor | None = None
    pairs: Tensor | None = None
    once: Optional[Once] = None

    @property
    def may_hide_all(self) -> bool:
        """Whether a query may see no key: a direction alone leaves each its own."""
        return self.key_padding is not None or self.pairs is not None

    def forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        """Return True where a query must not see a key, ``(B or 1, 1, T or 1, S)``, or None."""
        of = (self.direction, self.key_padding, self.pairs, tgt_len, src_len, device)
        return self.made("forbidden", of, lambda: self._forbidden(tgt_len, src_len, device))

    def made(self, kind: str, of: tuple[object, ...], make: Callable[[], _T]) -> _T:
        """Return what ``make`` makes, once for a forward pass; see :meth:`Once.made`."""
        return make() if self.once is None else self.once.made(kind, of, make)

    def _forbidden(self, tgt_len: int, src_len: int, device: torch.device) -> Tensor | None:
        parts = []
        if self.direction == "rl" or (self.direction == "lr" and tgt_len > 1):
            ones = torch.ones(tgt_len, src_len, dtype=torch.bool, device=device)
            diagonal = src_len - tgt_len
            parts.append(
                ones.triu(diagonal + 1) if self.direction == "lr" else ones.tril(diagonal - 1)
            )
        if self.pairs is not None:
            parts.append(self.pairs)
        if self.key_padding is not None:
            parts.append(self.key_padding[:, None, None, :])
        if not parts:
            return None
        forbidden = parts[0]
        for part in parts[1:]:
            forbidden = forbidden | part
        return forbidden if forbidden.dim() == 4 else forbidden[None, None]


class Call(NamedTuple):
    """What the choice of a backend depends on, beside the terms.

    Attributes:
        device: ``cpu``, ``cuda``.
        dtype: of queries, keys and values.
        tgt_len: T.
        src_len: S.
        head_dim: D.
        padded: whether a mask differs from sentence to sentence.
        dropout: whether weights are dropped.
        need_weights: whether the weights are asked for.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    tgt_len: int = 512
    src_len: int = 512
    head_dim: int = 64
    padded: bool = False
    dropout: bool = False
    need_weights: bool = False

    @classmethod
    def of(cls, query: Tensor, key: Tensor, mask: Mask, dropout: float, need_weights: bool) -> Call:
        """Return what matters of a call of :meth:`Backend.attend`."""
        return cls(
            query.device.type,
            query.dtype,
            query.size(2),
            key.size(2),
            query.size(3),
            mask.key_padding is not None,
            dropout > 0,
            need_weights,
        )


class Backend(Protocol):
    """A way to compute attention from queries, keys, values and terms."""

    def unavailable(self) -> str:
        """Return why this backend cannot run on this machine, or an empty string."""

    def refuses(self, terms: Terms, call: Call) -> str:
        """Return why this backend cannot compute such a call, or an empty string."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: Terms,
        mask: Mask,
        dropout: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values ``(B, H, T, D)`` and, if asked for, weights ``(B, H, T, S)``.

        Args:
            query: ``(B, H, T, D)``, unscaled; the last T of S positions.
            key: ``(B, H, S, D)``.
            value: ``(B, H, S, D)``.
            terms: what the position encodings add to the scores.
            mask: which keys a query may see. A query that may see none gets zeros.
            dropout: probability of dropping a weight; 0 outside training.
            need_weights: also return the weights before dropout.
        """


def scale_of(terms: Terms, head_dim: int) -> float:
    """Return the factor of the combined dot products, 1 / sqrt(c * D)."""
    factor = 1.0 if terms.scale_factor is None else terms.scale_factor
    return float((factor * head_dim) ** -0.5)


def full(x: Tensor) -> Tensor:
    """Return numbers in the type of scores and softmax: float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def by_distance(table: Tensor, tgt_len: int, src_len: int, first: Tensor | None = None) -> Tensor:
    """Return the numbers of a table for each query and key, ``(1 or B, G, T, S)``.

    Args:
        table: ``(G, R)``; rows are those of ``Span.of(tgt_len, src_len)``, and the reset's two.
        tgt_len: T.
        src_len: S.
        first: of :class:`~fairseq_posenc.encodings.terms.Terms`, for the reset.
    """
    if tgt_len == 1:
        pairs = table[:, None, :src_len]
    elif torch.compiler.is_compiling():  # which would compile `unfold` anew for each length
        pairs = in_pairs(table[None, :, None].expand(-1, -1, tgt_len, -1), src_len)[0]
    else:
        # The last query's rows are the table's first, those of the one before begin one later.
        pairs = table.unfold(1, src_len, 1)[:, :tgt_len].flip(1)
    if first is None:
        return pairs[None]
    here, there = table[:, -2:, None, None].unbind(1)
    return with_reset(pairs[None], here, there, first)


def in_pairs(products: Tensor, others: int) -> Tensor:
    """Return products of n tokens with rows, by token and other: ``(B, H, n, others)``, a view.

    Args:
        products: ``(B, H, n, R)``. Each token's others begin one row before those of the token
            before it: in a flat list, at the same place of lines that are shorter by one.
        others: how many there are.
    """
    tokens, rows = products.shape[2:]
    lines = products.flatten(2)[..., tokens - 1 : tokens * rows - 1]
    return lines.unflatten(2, (tokens, rows - 1))[..., :others]


def with_reset(pairs: Tensor, here: Tensor | int, there: Tensor | int, first: Tensor) -> Tensor:
    """Return what pairs have by distance, with the reset's two lines in their places.

    Args:
        pairs: ``(1 or B, G, T, S)``, or with one dimension more.
        here: what the pairs of the first token's query have, as broad as needed.
        there: the same of the first token's key, seen from any other query.
        first: see :class:`~fairseq_posenc.encodings.terms.Terms`.
    """
    more = [1] * (pairs.dim() - 4)
    queries = first[:, -pairs.size(2) :].reshape(first.size(0), 1, -1, 1, *more)
    keys = first.reshape(first.size(0), 1, 1, -1, *more)
    return torch.where(queries, here, torch.where(keys, there, pairs))
