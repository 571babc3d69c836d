# ruff: noqa: ANN001, ANN201
"""The relative shift inside the kernels: finds the table row of each pair of a tile.

A tile is N queries by N keys. Its distances span 2N - 1 consecutive rows of a table. Its *band* is
these rows and the one before them: pair (i, j) needs the band's row N + j - i. One matrix product
gives every query (or key) times every row of the band, ``(N, 2N)``. The products that the tile
needs begin one column earlier in every row: for N = 2, of products ``abcd | efgh`` they are
``cd | fg``, at 2, 3, 5, 6 of the flat list.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter computes with numpy, which has no bfloat16.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_rows(rows, start, count, width, FULL: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Load ``(N, W)``: rows from ``start`` on of ``(count, width)``, zeros beyond its ends.

    ``FULL`` promises that there are no ends within.
    """
    row = start + tl.arange(0, N)[:, None]
    column = tl.arange(0, W)[None, :]
    if FULL:
        return tl.load(rows + row * W + column)
    inside = (row >= 0) & (row < count) & (column < width)
    return tl.load(rows + row * width + column, mask=inside, other=0.0)


@triton.jit
def store_rows(rows, x, start, count, width, N: tl.constexpr, W: tl.constexpr):
    """Store ``(N, W)`` as rows from ``start`` on of ``(count, width)``."""
    row = start + tl.arange(0, N)[:, None]
    column = tl.arange(0, W)[None, :]
    inside = (row < count) & (column < width)
    tl.store(rows + row * width + column, x.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def multiply(x, y):
    """Multiply matrices in float32; float32 inputs are not rounded to TF32."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def add_product(sums, x, y):
    """Add one more matrix product to sums of float32."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, sums, input_precision="tf32x3")


@triton.jit
def add_exactly(sums, x, y):
    """Add the product of a float32 and a half precision matrix with little rounding.

    The float32 matrix is split into two of half precision, as 1.001 = 1.0 + 0.001.
    """
    high = x.to(y.dtype)
    sums = add_product(sums, high, y)
    if y.dtype != tl.float32:
        sums = add_product(sums, (x - high.to(tl.float32)).to(y.dtype), y)
    return sums


@triton.jit
def index_band(N: tl.constexpr, FLIP: tl.constexpr):
    """Compute the band's row of each element of a tile, ``(N, N)``; by (key, query) if flipped."""
    step = tl.arange(0, N)[None, :] - tl.arange(0, N)[:, None]  # [N, N]
    return N - step if FLIP else N + step


@triton.jit
def load_table(
    table, head, start, SIGN: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr
):
    """Load ``(COUNT, W)``: rows of a table from ``start`` on, upwards or downwards.

    Tables have ``PAD`` rows of zeros on either side, and are ``W`` wide.
    """
    row = start + PAD + SIGN * tl.arange(0, COUNT)[:, None]
    column = tl.arange(0, W)[None, :]
    rows = table.rows + head * table.head_stride + row * W + column
    return tl.load(rows)


@triton.jit
def load_band(
    problem, table, head, distance, COUNT: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Load rows of a table from a distance on, ``(COUNT, W)``."""
    start = distance + problem.tgt_len - 1
    return load_table(table, head, start, 1, COUNT, N, W)


@triton.jit
def gather_flat(x, index, N: tl.constexpr):
    """Gather ``(N, N)`` numbers of a flat list ``x`` at ``index``."""
    return tl.gather(x, index.reshape(N * N), 0).reshape(N, N)


@triton.jit
def multiply_band(x, band, ROWS: tl.constexpr, N: tl.constexpr, FLIP: tl.constexpr):
    """Multiply queries or keys with their table rows, ``x . a_r``, for a tile ``(N, N)``.

    Args:
        x: queries, keys or their gradients, ``(N, W)``.
        band: ``(2 * N, W)``.
        ROWS: whether the tile has a row for each of ``x``, else it has a column.
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
    """Load the scalars of a table for a tile, ``(N, N)`` of float32."""
    row = first_key - first_query + problem.tgt_len - 1 - N + tl.arange(0, 2 * N)
    inside = (row >= 0) & (row < problem.tgt_len + problem.src_len - 1)
    band = tl.load(table.rows + head * table.head_stride + row, mask=inside, other=0.0)
    return gather_flat(band, index_band(N, FLIP), N)


@triton.jit
def roll_rows(tile, N: tl.constexpr):
    """Rotate row i of an (N, N) tile left by i columns, so that column 0 holds the diagonal.

    For N = 3, rows ``abc def ghi`` become ``abc efd igh``. Element (i, s) then belongs to the key
    i + s, of distance s; or to the distance s - N if it wrapped round. So weights by pair become
    weights by distance, of which :func:`mask_half` takes those of N rows of the value table.
    """
    i = tl.arange(0, N)[:, None]
    return gather_flat(tile.reshape(N * N), i * N + (tl.arange(0, N)[None, :] + i) % N, N)


@triton.jit
def mask_half(rolled, HALF: tl.constexpr, N: tl.constexpr):
    """Keep distances 0 .. N-1 of a rolled tile (HALF 1) or -N .. -1 (HALF 0); zeros elsewhere."""
    not_wrapped = tl.arange(0, N)[None, :] + tl.arange(0, N)[:, None] < N
    return tl.where(not_wrapped, rolled, 0.0) if HALF else tl.where(not_wrapped, 0.0, rolled)
