"""The contract of a position encoding, and the shape legend of the package.

An encoding is a small module with trained parameters. It says what it contributes and never how
attention is computed: scores have one form, so what an encoding adds to them is data
(:class:`Terms`), and every backend serves every encoding.

With q_i and k_j the (rotated) query and key and r = j - i their distance, the score is::

    e_ij = scale * combine(gain_r * q_i.k_j,  q_i.Q_r,  k_j.K_r)  +  bias_r  +  bias_ij

where combine is a sum or a product, scale = 1 / sqrt(scale_factor * head_dim).

Shape legend (used in all comments):
    B batch, T queries, S keys, H heads, D head size, C model size,
    G groups of heads with a table of their own (1: all heads share it, or H),
    R rows of a table: one for each distance of a :class:`~fairseq_posenc.positions.Span`.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span

INIT_STD = 0.02  # BERT's, as for the rest of a masked language model


class Dims(NamedTuple):
    """The sizes of a stack of layers that an encoding is built for."""

    embed_dim: int
    num_heads: int
    max_positions: int
    causal: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embed_dim // self.num_heads


class Terms(NamedTuple):
    """What an encoding adds to the attention scores, as data (see the module's equation).

    Tables hold a row for each distance of the span they were asked for, from low to high. With
    ``first`` (the reset of the first token), two rows follow: that of a query at the first token,
    and that of a key there seen from any other query.

    Attributes:
        query_table: ``(G, R, D)``, Q.
        key_table: ``(G, R, D)``, K.
        gain: ``(G, R)``, multiplies the content term.
        bias: ``(G, R)``, added after scaling.
        pair_bias: ``(B or 1, G, T, S)``, added after scaling.
        product: combine by product in place of the sum.
        scale_factor: c of the scale 1/sqrt(c * D); None leaves it to the others (1 if none says).
        first: ``(B, S)`` of bool, the first real token of each row; None means no reset.
    """

    query_table: Tensor | None = None
    key_table: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    pair_bias: Tensor | None = None
    product: bool = False
    scale_factor: float | None = None
    first: Tensor | None = None

    @property
    def content_only(self) -> bool:
        """Whether the terms are a plain scaled dot product, with or without a bias."""
        return self.query_table is None and self.key_table is None and self.gain is None

    def __or__(self, other: Terms) -> Terms:
        """Return the terms of two encodings together; refuse what has no meaning."""
        if (self.first is None) != (other.first is None) and self.changes and other.changes:
            raise UserError("reset must apply to every encoding of the scores, or to none")
        if self.multiplies and other.multiplies:
            raise UserError("two encodings that multiply the scores cannot be combined")
        return Terms(
            query_table=_only_one("query table", self.query_table, other.query_table),
            key_table=_only_one("key table", self.key_table, other.key_table),
            gain=_only_one("gain", self.gain, other.gain),
            bias=_sum(self.bias, other.bias),
            pair_bias=_sum(self.pair_bias, other.pair_bias),
            product=self.product or other.product,
            scale_factor=_same_scale(self.scale_factor, other.scale_factor),
            first=self.first if self.first is not None else other.first,
        )

    @property
    def multiplies(self) -> bool:
        """Whether the content term is multiplied."""
        return self.product or self.gain is not None

    @property
    def changes(self) -> bool:
        """Whether anything differs from plain attention by a table or bias."""
        return not self.content_only or self.bias is not None or self.pair_bias is not None


def _only_one(what: str, ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    if ours is not None and theirs is not None:
        raise UserError(f"two encodings both bring a {what} to the scores: choose one of them")
    return ours if ours is not None else theirs


def _sum(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    if ours is None or theirs is None:
        return ours if ours is not None else theirs
    return ours + theirs


def _same_scale(ours: float | None, theirs: float | None) -> float | None:
    if ours is not None and theirs is not None and ours != theirs:
        raise UserError(
            f"two encodings scale the scores by different factors ({ours:g} and {theirs:g}): "
            "set scale_factor of one of them"
        )
    return ours if ours is not None else theirs


class Encoding(nn.Module):
    """Base class of all encodings. Hooks have an identity default; override what you need.

    Options are the keyword-only arguments of the subclass's constructor, with types and defaults:
    the command line, the documentation and the error messages are made from them.
    """

    name: ClassVar[str]  # set by the registry
    acts_on: ClassVar[Literal["input", "rotation", "scores"]]
    shared: ClassVar[bool] = False  # True: one module for all layers, else one for each layer

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""

    def embed(self, positions: Positions) -> Tensor | None:
        """Return vectors ``(B or 1, T, C)`` to add to the token embeddings, or None."""
        return None

    def rotate(self, query: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated query and key, both ``(B, H, T, D)``.

        Args:
            query: unscaled queries.
            key: keys of the same tokens; keys of earlier ones are cached already rotated.
            index: the tokens' positions, ``(B or 1, T)``.
        """
        return query, key

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return what is added to the scores for the distances of ``span``.

        Args:
            span: the distances that the tables must hold rows for.
            positions: the tokens' positions, for terms that are no function of distance.
        """
        return Terms()

    @classmethod
    def parameter_count(cls, dims: Dims, layers: int) -> int:
        """Return the number of trained parameters in a stack of ``layers`` (default options)."""
        raise NotImplementedError(f"{cls.__name__} must give its parameter count in closed form")


class Encodings(nn.ModuleDict):
    """Encodings that work together, by name."""

    def each(self) -> list[Encoding]:
        """Return the encodings in the order of their spec."""
        return [encoding for encoding in self.values() if isinstance(encoding, Encoding)]

    def rotate(self, query: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key after every rotation (see :meth:`Encoding.rotate`)."""
        for encoding in self.each():
            query, key = encoding.rotate(query, key, index)
        return query, key

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the terms of all encodings together (see :meth:`Encoding.terms`)."""
        return reduce(or_, (encoding.terms(span, positions) for encoding in self.each()), Terms())


class DistanceTable(nn.Module):
    """Trained rows by clipped signed distance: row ``clip(r, -K, K) + K``, r = j - i.

    Args:
        max_distance: K.
        width: size of a row, or None for scalars.
        groups: 1 if the heads share the table, else the number of heads.
        reset: append two rows: a query at the first token, a key at the first token.

    Shapes:
        weight ``(G, 2K + 1 (+ 2), width)`` or ``(G, 2K + 1 (+ 2))``.
    """

    def __init__(
        self, max_distance: int, width: int | None = None, groups: int = 1, reset: bool = False
    ) -> None:
        super().__init__()
        if max_distance < 1:
            raise UserError(f"max_distance must be at least 1, not {max_distance}")
        self.max_distance = max_distance
        self.reset = reset
        rows = 2 * max_distance + 1 + (2 if reset else 0)
        self.weight = nn.Parameter(
            torch.empty((groups, rows) + (() if width is None else (width,)))
        )

    def rows(self, span: Span) -> Tensor:
        """Return the rows for the distances of ``span``: ``(G, R, width)`` or ``(G, R)``."""
        limit = self.max_distance
        low, high = (max(-limit, min(limit, end)) for end in (span.low, span.high))
        # A slice with repeated ends: cheaper than an index, and its gradient is deterministic.
        rows = self.weight[:, low + limit : high + limit + 1]
        beyond = span.high - span.low + 1 - rows.size(1)
        before = min(max(low - span.low, 0), beyond)
        parts = [_repeat(rows[:, :1], before), rows, _repeat(rows[:, -1:], beyond - before)]
        if self.reset:
            parts.append(self.weight[:, -2:])
        parts = [part for part in parts if part.size(1)]
        return torch.cat(parts, dim=1) if len(parts) > 1 else rows

    def first(self, positions: Positions) -> Tensor | None:
        """Return :attr:`Terms.first` for this table: where its two reset rows apply."""
        return positions.is_first() if self.reset else None


def _repeat(row: Tensor, times: int) -> Tensor:
    return row.expand(-1, times, *row.shape[2:])
