"""What every kernel is given: the tensors of one attention call, and their sizes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Table(NamedTuple):
    """A table by distance, as the kernels take it.

    Attributes:
        rows: ``(G, R, D)`` or ``(G, R)``, contiguous; G is 1 or H.
        head_stride: numbers from one head's rows to the next one's; 0 if the heads share them.
    """

    rows: Tensor
    head_stride: int

    @classmethod
    def of(cls, rows: Tensor | None) -> Table | None:
        """Return a tensor with its stride, or None for None."""
        if rows is None:
            return None
        return cls(rows, rows[0].numel() if rows.size(0) > 1 else 0)


class Problem(NamedTuple):
    """The inputs of one call, as the kernels take them. A field that is None costs nothing there.

    All tensors are contiguous. Masks are uint8, 1 for True.

    Attributes:
        query: ``(B, H, T, D)``.
        key: ``(B, H, S, D)``.
        value: ``(B, H, S, D)``.
        query_table: vectors Q.
        key_table: vectors K.
        value_table: vectors V.
        gain: scalars.
        bias: scalars.
        query_reset: ``(B, H, T, 2)`` of float32, products of the queries with the reset rows of Q.
        key_reset: ``(B, H, S, 2)`` of float32, products of the keys with the reset rows of K.
        first: ``(B, S)``, the first token of each row.
        padding: ``(B, S)``, keys that nobody may see.
        pairs: ``(T, S)``, keys that a query must not see.
        seed: of dropout; None for no dropout.
        dropout: probability of dropping a weight.
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
    query_reset: Tensor | None
    key_reset: Tensor | None
    first: Tensor | None
    padding: Tensor | None
    pairs: Tensor | None
    seed: int | None
    dropout: float
    scale: float
    heads: int
    tgt_len: int
    src_len: int
    width: int


class Saved(NamedTuple):
    """What the backward kernels need beside the problem.

    Attributes:
        grad: ``(B, H, T, D)``, of the attended values.
        log_sums: ``(B, H, T)`` of float32, base-2 logarithms of the sums of exponentials.
        dots: ``(B, H, T)`` of float32, the sum of each query's weights times their gradients.
        value_reset: ``(B, H, T, 2)`` of float32, gradients of the weights on the reset rows of V.
    """

    grad: Tensor
    log_sums: Tensor
    dots: Tensor
    value_reset: Tensor | None


class Bands(NamedTuple):
    """What the backward kernel of the tables writes, all in float32; None where nobody asks.

    Each is by head, chunk of the batch, and diagonal of blocks; N is the size of a block.

    Attributes:
        query_table: ``(H, chunks, diagonals, 2 * N, D)``.
        key_table: ``(H, chunks, diagonals, 2 * N, D)``.
        value_table: ``(H, chunks, diagonals, 2 * N, D)``.
        gain: ``(H, chunks, diagonals, 4 * N)``; after the band the sums of the two reset rows.
        bias: ``(H, chunks, diagonals, 4 * N)``.
    """

    query_table: Tensor | None
    key_table: Tensor | None
    value_table: Tensor | None
    gain: Tensor | None
    bias: Tensor | None
