# ruff: noqa: ANN001, ANN201
"""The relative shift inside the kernels: finds the table row of each pair of a tile.

A tile is N queries by N keys. Its distances span 2N - 1 consecutive rows of a table. Its *band* is
these rows and the one before them, since Triton needs powers of 2: pair (i, j) of the tile has the
band's row N + j - i. One matrix product gives every query (or key) times every row of the band,
``(N, 2N)``. The products that the tile needs begin one column earlier in every row: for N = 2, of
products ``abcd | efgh`` they are ``cd | fg``, at 2, 3, 5, 6 of the flat list.

``problem`` and ``table`` are a ``Problem`` and a ``Table`` of ``problem.py``. Row r of a table
belongs to distance r - (T - 1), where T is the number of queries and a distance is the index of a
key minus that of a query, both from 0. Tables of vectors have N more rows of zeros on either side,
so that loads need no mask, and are padded to the width W; tables of scalars are not padded.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.matrices import multiply


@triton.jit
def index_band(N: tl.constexpr, FLIP: tl.constexpr):
    """Compute the band's row of each element of a tile, ``(N, N)``; by (key, query) if flipped."""
    column_minus_row = tl.arange(0, N)[None, :] - tl.arange(0, N)[:, None]  # [N, N]
    return N - column_minus_row if FLIP else N + column_minus_row


@triton.jit
def load_table(
    table, head, start, SIGN: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Load vectors ``(COUNT, W)``: table rows ``start``, ``start + SIGN``, ...; SIGN is 1 or -1."""
    row = start + N + SIGN * tl.arange(0, COUNT)[:, None]
    column = tl.arange(0, W)[None, :]
    return tl.load(table.rows + head * table.head_stride + row * W + column)


@triton.jit
def load_distances(
    problem, table, head, distance, COUNT: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Load the vectors of ``distance`` and the next distances, ``(COUNT, W)``."""
    row = distance + problem.tgt_len - 1
    return load_table(table, head, row, 1, COUNT, N, W)


@triton.jit
def load_band(problem, table, head, first_query, first_key, N: tl.constexpr, W: tl.constexpr):
    """Load the band of a tile, ``(2 * N, W)``."""
    return load_distances(problem, table, head, first_key - first_query - N, 2 * N, N, W)


@triton.jit
def gather_flat(x, index, N: tl.constexpr):
    """Gather ``(N, N)`` numbers of a flat list ``x`` at ``index``."""
    return tl.gather(x, index.reshape(N * N), 0).reshape(N, N)


@triton.jit
def multiply_band(x, band, ROWS: tl.constexpr, N: tl.constexpr, FLIP: tl.constexpr):
    """Multiply queries or keys with the table rows of their pairs, for a tile ``(N, N)``.

    Args:
        x: queries, keys or gradients of outputs, ``(N, W)``.
        band: ``(2 * N, W)``.
        ROWS: whether each of ``x`` has a row of the tile, else it has a column.
        N: queries and keys of a tile.
        FLIP: whether the tile is by (key, query).
    """
    if ROWS:
        product = multiply(x, tl.trans(band)).reshape(2 * N * N)  # of [N, 2N]
        return gather_flat(product, tl.arange(0, N)[:, None] * (2 * N) + index_band(N, FLIP), N)
    product = multiply(band, tl.trans(x)).reshape(2 * N * N)  # of [2N, N]
    return gather_flat(product, index_band(N, FLIP) * N + tl.arange(0, N)[None, :], N)


@triton.jit
def load_scalars(problem, table, head, first_query, first_key, N: tl.constexpr, FLIP: tl.constexpr):
    """Load the scalars of a table for a tile, ``(N, N)``."""
    row = first_key - first_query + problem.tgt_len - 1 - N + tl.arange(0, 2 * N)
    inside = (row >= 0) & (row < problem.tgt_len + problem.src_len - 1)
    band = tl.load(table.rows + head * table.head_stride + row, mask=inside, other=0.0)
    return gather_flat(band, index_band(N, FLIP), N)


@triton.jit
def roll_rows(tile, N: tl.constexpr):
    """Rotate row i of an (N, N) tile left by i columns, so that column 0 holds the diagonal.

    For N = 3, rows ``abc def ghi`` become ``abc efd igh``. Element (i, s) then has the distance s,
    or s - N if it wrapped round. So weights by pair become weights by distance, with two distances
    in a column. :func:`mask_half` keeps those of one, so that N rows of a table serve a tile.
    """
    i = tl.arange(0, N)[:, None]
    return gather_flat(tile.reshape(N * N), i * N + (tl.arange(0, N)[None, :] + i) % N, N)


@triton.jit
def mask_half(rolled, HALF: tl.constexpr, N: tl.constexpr):
    """Keep distances 0 .. N-1 of a rolled tile (HALF 1) or -N .. -1 (HALF 0); zeros elsewhere."""
    not_wrapped = tl.arange(0, N)[None, :] + tl.arange(0, N)[:, None] < N
    return tl.where(not_wrapped, rolled, 0.0) if HALF else tl.where(not_wrapped, 0.0, rolled)
