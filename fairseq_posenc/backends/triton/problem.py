"""The arguments of every kernel: the tensors of one attention call, and their sizes.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table; N queries or keys of a tile. A sequence is one head of one sentence.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked import dropout


class Table(NamedTuple):
    """A table by distance, as a kernel argument."""

    # `(G, R, D)` or `(G, R)`, contiguous; G is 1 or H. Vectors have N rows of zeros on either
    # side, and D is padded to a power of 2
    rows: Tensor
    head_stride: int  # numbers from one head's rows to the next one's; 0 if the heads share them

    @classmethod
    def from_rows(cls, rows: Tensor | None) -> Table | None:
        """Describe a tensor with its stride; None for None."""
        if rows is None:
            return None
        return cls(rows, rows[0].numel() if rows.size(0) > 1 else 0)


class KernelDropout(NamedTuple):
    """Dropout, as a kernel argument; see :class:`Dropout`."""

    first_seeds: Tensor  # the first seed of each query, `(B, H, T)` of int32
    second_seeds: Tensor  # the second seed of each query, `(B, H, T)` of int32
    key_seeds: Tensor  # the seed of each key, `(B, H, S)` of int32
    keep_threshold: int  # a hash below it keeps a weight


class Dropout(NamedTuple):
    """The seeds of a call, from which both passes compute the same dropped weights.

    The seeds are those of :mod:`~fairseq_posenc.backends.blocked.dropout`.
    """

    rate: float  # probability of dropping a weight
    query_seeds: Tensor  # two for each query, `(2, B, H, T)` of int32
    key_seeds: Tensor  # one for each key, `(B, H, S)` of int32

    @classmethod
    def draw(cls, rate: float, query: Tensor, key: Tensor) -> Dropout:
        """Draw from torch's generator, so a forward pass done again drops the same weights."""
        query_seeds = dropout.draw_seeds(2, *query.shape[:3], device=query.device)
        key_seeds = dropout.draw_seeds(*key.shape[:3], device=query.device)
        return cls(rate, query_seeds, key_seeds)

    def for_kernels(self) -> KernelDropout:
        """Build the kernels' argument."""
        first_seeds, second_seeds = self.query_seeds
        keep_threshold = dropout.compute_keep_threshold(self.rate)
        return KernelDropout(first_seeds, second_seeds, self.key_seeds, keep_threshold)


class Problem(NamedTuple):
    """The inputs of one call, as a kernel argument; kernels are compiled without the None fields.

    All tensors are contiguous. Masks are uint8, 1 for True.
    """

    query: Tensor  # `(B, H, T, D)`
    key: Tensor  # `(B, H, S, D)`
    value: Tensor  # `(B, H, S, D)`
    query_table: Table | None  # vectors Q, of the queries' type like all vectors
    key_table: Table | None  # vectors K
    value_table: Table | None  # vectors V
    gain: Table | None  # scalars of float32
    bias: Table | None  # scalars of float32
    padding: Tensor | None  # `(B, S)`, keys that nobody may see
    pairs: Tensor | None  # `(T, S)`, keys that a query must not see
    drop: KernelDropout | None
    dropout_scale: float  # factor of the kept weights, 1 / (1 - rate)
    scale: float  # factor of the combined dot products
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    width: int  # D

    @property
    def has_vectors(self) -> bool:
        """Whether any table has vectors."""
        return any(x is not None for x in (self.query_table, self.key_table, self.value_table))


class TrainedTables(NamedTuple):
    """Which tables need a gradient."""

    query_table: bool
    key_table: bool
    value_table: bool
    gain: bool
    bias: bool


class Saved(NamedTuple):
    """Results of the forward pass and its gradient, for the backward kernels."""

    grad: Tensor  # `(B, H, T, D)`, of the attended values
    log_sums: Tensor  # `(B, H, T)` of float32, base-2 logarithms of the sums of exponentials
    # `(B, H, T)` of float32, the sum of each query's weights times their gradients, times the
    # scale
    dots: Tensor


class Layout(NamedTuple):
    """The keys that the backward pass takes at a time, and the strides of their stored tiles."""

    start: int  # the first key, a multiple of N
    end: int  # one past the last key
    queries: int  # rows of queries, T up to a multiple of N
    keys: int  # rows of keys, `end - start` up to a multiple of N
    query_stride: int  # numbers from a query's row to the next one's
    key_stride: int  # numbers from a key's row to the next one's


class Slab(NamedTuple):
    """A part of the pairs that the backward pass takes at a time."""

    sequence: int  # the first one
    sequences: int  # how many there are
    layout: Layout  # how their tiles lie in memory


class Tiles(NamedTuple):
    """Gradients of the parts of the scores for the pairs of a slab; None for one not needed.

    Each row has N zeros before and after, so that reading it by distance needs no bounds.
    """

    content: Tensor  # queries times keys, `(sequences, queries, query_stride)`
    query: Tensor | None  # the query term, same shape; None if it equals the content's
    gain: Tensor | None  # the gain's part, same shape
    bias: Tensor | None  # the whole score, same shape
    weights: Tensor | None  # the weights after dropout without its factor, same shape
    key: Tensor | None  # the key term, `(sequences, keys, key_stride)`


class Side(NamedTuple):
    """The layout of tiles: a row for each query, a column for each key, or the other way round."""

    heads: int  # H
    width: int  # D
    rows: int  # rows of a sequence's tiles
    columns: int  # columns without the zeros
    stride: int  # numbers from a row to the next one's
    content_rows: int  # the same of the content's tiles, which have a row for each query
    content_stride: int  # numbers from one of those rows to the next one's
    row_tokens: int  # T if rows are queries, else S
    row_start: int  # the query or key of the first row
    row_end: int  # one past that of the last row
    column_tokens: int  # S if rows are queries, else T
    column_start: int  # the key or query of the first column after the zeros
    row_of_distance_zero: int  # the table's row where query and key have the same index, T - 1
    table_rows: int  # R
    factor: float = 1.0  # factor of the gradients of queries, keys or values
