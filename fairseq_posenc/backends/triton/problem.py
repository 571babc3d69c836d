"""The arguments of every kernel: the tensors of one attention call, and their sizes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Table(NamedTuple):
    """A table by distance, as a kernel argument.

    Attributes:
        rows: ``(G, R, D)`` or ``(G, R)``, contiguous; G is 1 or H. Vectors have N rows of zeros on
            either side, and D is filled up to a power of 2.
        head_stride: numbers from one head's rows to the next one's; 0 if the heads share them.
    """

    rows: Tensor
    head_stride: int

    @classmethod
    def from_rows(cls, rows: Tensor | None) -> Table | None:
        """Describe a tensor with its stride; None for None."""
        if rows is None:
            return None
        return cls(rows, rows[0].numel() if rows.size(0) > 1 else 0)


class Drop(NamedTuple):
    """Dropout, as a kernel argument.

    Source: :class:`~fairseq_posenc.backends.triton.dropout.Dropout`, which draws the keys.

    Attributes:
        first: the first key of each query, ``(B, H, T)`` of int32.
        second: the second one, ``(B, H, T)`` of int32.
        keys: ``(B, H, S)`` of int32.
        keep_threshold: mixed bits below it keep a weight.
    """

    first: Tensor
    second: Tensor
    keys: Tensor
    keep_threshold: int


class Problem(NamedTuple):
    """The inputs of one call, as a kernel argument. A field that is None costs nothing there.

    All tensors are contiguous. Masks are uint8, 1 for True.

    Attributes:
        query: ``(B, H, T, D)``.
        key: ``(B, H, S, D)``.
        value: ``(B, H, S, D)``.
        query_table: vectors Q, of the queries' type like all vectors.
        key_table: vectors K.
        value_table: vectors V.
        gain: scalars of float32.
        bias: scalars of float32.
        padding: ``(B, S)``, keys that nobody may see.
        pairs: ``(T, S)``, keys that a query must not see.
        drop: None for no dropout.
        dropout_scale: factor of the kept weights, 1 / (1 - rate).
        scale: factor of the combined dot products.
        heads: H.
        tgt_len: T.
        src_len: S.
        width: D.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_table: Table | None
    key_table: Table | None
    value_table: Table | None
    gain: Table | None
    bias: Table | None
    padding: Tensor | None
    pairs: Tensor | None
    drop: Drop | None
    dropout_scale: float
    scale: float
    heads: int
    tgt_len: int
    src_len: int
    width: int


class Saved(NamedTuple):
    """Results of the forward pass and its gradient, for the backward kernels.

    Attributes:
        grad: ``(B, H, T, D)``, of the attended values.
        log_sums: ``(B, H, T)`` of float32, base-2 logarithms of the sums of exponentials.
        dots: ``(B, H, T)`` of float32, the sum of each query's weights times their gradients, times
            the scale.
    """

    grad: Tensor
    log_sums: Tensor
    dots: Tensor


class Layout(NamedTuple):
    """The keys that the backward pass takes at a time, and the strides of their stored tiles.

    Attributes:
        start: the first key, a multiple of N.
        end: one past the last key.
        queries: rows of queries, T up to a multiple of N.
        keys: rows of keys, ``end - start`` up to a multiple of N.
        query_stride: numbers from a query's row to the next one's.
        key_stride: numbers from a key's row to the next one's.
    """

    start: int
    end: int
    queries: int
    keys: int
    query_stride: int
    key_stride: int


class Slab(NamedTuple):
    """A part of the pairs that the backward pass takes at a time.

    Attributes:
        sequence: the first one (of a batch and head).
        sequences: how many there are.
        layout: of their tiles.
    """

    sequence: int
    sequences: int
    layout: Layout


class Tiles(NamedTuple):
    """Gradients of the factors of the scores for the pairs of a slab; None where nobody asks.

    Each row has N zeros before and after, so that it can be read by distance without looking where
    it ends.

    Attributes:
        content: of queries times keys, ``(sequences, queries, query_stride)``.
        query: of the query term, the same; None if it equals that of the content.
        gain: of the gain, the same.
        bias: of the whole score, the same.
        weights: no gradients, but the weights after dropout without its factor, the same.
        key: of the key term, ``(sequences, keys, key_stride)``.
    """

    content: Tensor
    query: Tensor | None
    gain: Tensor | None
    bias: Tensor | None
    weights: Tensor | None
    key: Tensor | None


class Side(NamedTuple):
    """The layout of tiles: a row for each query and a column for each key, or the other way round.

    Attributes:
        heads: H.
        width: D.
        rows: of a sequence's tiles.
        columns: of them, without the zeros.
        stride: numbers from a row to the next one's.
        content_rows: the same of the content's tiles, which have a row for each query.
        content_stride: numbers from one of those rows to the next one's.
        own: T if rows are queries, else S.
        own_start: the query or key of the first row.
        own_end: one past that of the last row.
        others: S if rows are queries, else T.
        other_start: the key or query of the first column after the zeros.
        zero: the table's row for a distance of zero, where distances are counted from 0.
        table_rows: R.
        factor: of the gradients of queries, keys or values.
    """

    heads: int
    width: int
    rows: int
    columns: int
    stride: int
    content_rows: int
    content_stride: int
    own: int
    own_start: int
    own_end: int
    others: int
    other_start: int
    zero: int
    table_rows: int
    factor: float = 1.0
