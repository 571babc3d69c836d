"""The arguments of the kernels, as NamedTuples: tensors, sizes and strides.

A kernel reads their fields by name, and is compiled without those that are None.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table; N queries or keys of a tile. A sequence is one head of one sentence.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked import dropout


class Table(NamedTuple):
    """A table by distance."""

    # `(G, R, D)` or `(G, R)`, contiguous; G is 1 or H. Vectors have N rows of zeros on either
    # side, and D is padded to a power of 2
    rows: Tensor
    head_stride: int  # numbers from one head's rows to the next one's; 0 if the heads share them

    @classmethod
    def from_rows(cls, rows: Tensor) -> Table:
        """Describe a tensor with its stride."""
        return cls(rows, rows[0].numel() if rows.size(0) > 1 else 0)


class Dropout(NamedTuple):
    """The seeds of a call, from which both passes compute the same dropped weights.

    The seeds are those of :mod:`~fairseq_posenc.backends.blocked.dropout`.
    """

    first_seeds: Tensor  # the first seed of each query, `(B, H, T)` of int32
    second_seeds: Tensor  # the second seed of each query, `(B, H, T)` of int32
    key_seeds: Tensor  # the seed of each key, `(B, H, S)` of int32
    rate: float  # probability of dropping a weight

    @classmethod
    def draw(cls, rate: float, query: Tensor, key: Tensor) -> Dropout:
        """Draw from torch's generator, so a forward pass done again drops the same weights."""
        first_seeds, second_seeds = dropout.draw_seeds(2, *query.shape[:3], device=query.device)
        key_seeds = dropout.draw_seeds(*key.shape[:3], device=query.device)
        return cls(first_seeds, second_seeds, key_seeds, rate)


class Problem(NamedTuple):
    """The inputs of one call.

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
    padding: Tensor | None  # `(B, S)`, keys that no query may see
    pairs: Tensor | None  # `(T, S)`, keys that a query must not see
    dropout: Dropout | None
    keep_threshold: int  # a hash below it keeps a weight
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
    """Results of the forward pass and the gradient of its output, for the backward kernel."""

    grad: Tensor  # `(B, H, T, D)`, of the attended values
    log_sums: Tensor  # `(B, H, T)` of float32, base-2 logarithms of the sums of exponentials
    # `(B, H, T)` of float32, FlashAttention's delta times the problem's scale: for each query, the
    # sum of the gradients of its weights by weight
    delta: Tensor


class Layout(NamedTuple):
    """The keys of a slab, and how its tiles lie in memory."""

    start: int  # the first key, a multiple of N
    end: int  # one past the last key
    queries: int  # rows of queries, T up to a multiple of N
    keys: int  # rows of keys, `end - start` up to a multiple of N
    query_stride: int  # numbers from a query's row to the next one's
    key_stride: int  # numbers from a key's row to the next one's


class Slab(NamedTuple):
    """The pairs whose tiles the backward pass stores together."""

    sequence: int  # the first sequence
    sequences: int  # number of sequences
    layout: Layout  # the keys of each of them


class Tiles(NamedTuple):
    """Gradients of the parts of the scores for the pairs of a slab; None for one not needed.

    Each row has N zeros before and after, so that reading it by distance needs no bounds. All
    gradients are multiplied by the problem's scale.
    """

    content: Tensor  # of queries times keys, `(sequences, queries, query_stride)`
    query_term: Tensor | None  # of the same shape; None if it equals the content's
    gain: Tensor | None  # of the gain, same shape
    bias: Tensor | None  # of the bias, same shape; None if it equals the content's
    weights: Tensor | None  # no gradient, but the kept weights (see `backward`), same shape
    key_term: Tensor | None  # by key, `(sequences, keys, key_stride)`


class Side(NamedTuple):
    """The layout of tiles with a row for each query and a column for each key, or the reverse."""

    heads: int  # H
    width: int  # D
    rows: int  # rows of a sequence's tiles
    columns: int  # columns without the zeros
    stride: int  # numbers from a row to the next one
    content_rows: int  # rows of the content's tiles, which have a row for each query in any case
    content_stride: int  # numbers from one of those rows to the next one
    row_tokens: int  # T if rows are queries, else S
    row_start: int  # the query or key of the first row
    row_end: int  # one past the query or key of the last row
    column_tokens: int  # S if rows are queries, else T
    column_start: int  # the key or query of the first column after the zeros
    row_of_distance_zero: int  # the table's row where query and key have the same index, T - 1
    table_rows: int  # R
    factor: float = 1.0  # factor of the gradients of queries, keys or values
