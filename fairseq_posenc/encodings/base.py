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
        """D, the width of one head."""
        return self.embed_dim // self.num_heads

    def scale(self, scale_factor: float) -> float:
        """Return the scale 1 / sqrt(c * D) of the scores."""
        return float((scale_factor * self.head_dim) ** -0.5)


class Terms(NamedTuple):
    """What an encoding adds to the attention scores, as data (see the module's equation).

    Tables hold a row for each distance of the span they were asked for, from low to high. With
    ``first`` (the reset of the first token), two rows follow: that of a query at the first token,
    and that of a key there seen from any other query.

    Attributes:
        query_table: ``(G, R, D)``, Q.
        key_table: ``(G, R, D)``, K.
        gain: ``(G, R)``, multiplies the content term.
        channel_gain: ``(G, R, D)``, multiplies the content term channel by channel.
        content_rows: ``(R, C)``, which each layer projects by its own key and query projections to
            query and key tables.
        value_table: ``(G, R, D)``, added to the value that a query attends to at a distance.
        bias: ``(G, R)``, added after scaling.
        pair_bias: ``(B or 1, G, T, S)``, added after scaling.
        product: combine by product in place of the sum.
        scale_factor: c of the scale 1/sqrt(c * D); None leaves it to the others (1 if none says).
        first: ``(B or 1, S)`` of bool, the first real token of each row; None means no reset.
    """

    query_table: Tensor | None = None
    key_table: Tensor | None = None
    gain: Tensor | None = None
    channel_gain: Tensor | None = None
    content_rows: Tensor | None = None
    value_table: Tensor | None = None
    bias: Tensor | None = None
    pair_bias: Tensor | None = None
    product: bool = False
    scale_factor: float | None = None
    first: Tensor | None = None

    @property
    def content_only(self) -> bool:
        """Whether attention is a plain scaled dot product, with or without a bias."""
        biases = Terms(bias=self.bias, pair_bias=self.pair_bias)
        plain = biases._replace(scale_factor=self.scale_factor, first=self.first)
        return all(ours is theirs for ours, theirs in zip(self, plain))

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
            channel_gain=_only_one("gain of channels", self.channel_gain, other.channel_gain),
            content_rows=_only_one("table", self.content_rows, other.content_rows),
            value_table=_only_one("value table", self.value_table, other.value_table),
            bias=_sum(self.bias, other.bias),
            pair_bias=_sum(self.pair_bias, other.pair_bias),
            product=self.product or other.product,
            scale_factor=_same_scale(self.scale_factor, other.scale_factor),
            first=self.first if self.first is not None else other.first,
        )

    def unprojected(self, num_heads: int) -> Terms:
        """Return the terms with content rows as tables, for use without a layer's projections."""
        if self.content_rows is None:
            return self
        rows = self.content_rows.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [H, R, D]
        return self._replace(content_rows=None) | Terms(query_table=rows, key_table=rows)

    @property
    def multiplies(self) -> bool:
        """Whether the content term is multiplied."""
        return self.product or self.gain is not None or self.channel_gain is not None

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
    the command line, the documentation and the error messages are made from them. Specs refuse
    numbers that are not above 0.
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
