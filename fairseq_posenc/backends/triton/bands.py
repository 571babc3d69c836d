# mypy: disable-error-code="no-untyped-def"
"""Tables by distance inside the kernels: which rows a tile needs, and where each of them goes.

A tile is N queries by N keys. Its distances span 2N - 1 consecutive rows of a table, the band,
which is loaded as a left and a right half of N rows. Element (i, j) needs row N - 1 + j - i of the
band, which lies in the left half where j <= i, else in the right one, and in both at
(j - i - 1) mod N. So the halves are merged first, and the merged tile is rotated row by row.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter computes with numpy, which has no bfloat16.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_rows(rows, start, count, width, N: tl.constexpr, W: tl.constexpr):
    """Return ``(N, W)``: rows from ``start`` on of ``(count, width)``, zeros beyond its ends."""
    row = start + tl.arange(0, N)[:, None]
    column = tl.arange(0, W)[None, :]
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
    """Return a matrix product in float32; float32 inputs are not rounded to TF32."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def multiply_exactly(x, y):
    """Return the product of a matrix of float32 with one of half precision, hardly rounding."""
    high = x.to(y.dtype)
    product = multiply(high, y)
    if y.dtype != tl.float32:
        product += multiply((x - high.to(tl.float32)).to(y.dtype), y)
    return product


@triton.jit
def load_band(problem, table, head, m0, n0, N: tl.constexpr, W: tl.constexpr):
    """Return the left and the right half of a tile's band, both ``(N, W)``."""
    count = problem.tgt_len + problem.src_len - 1
    start = n0 - m0 + problem.tgt_len - N
    rows = table.rows + head * table.head_stride
    left = load_rows(rows, start, count, problem.width, N, W)
    right = load_rows(rows, start + N, count, problem.width, N, W)
    dtype = problem.query.dtype.element_ty
    return left.to(dtype), right.to(dtype)


@triton.jit
def is_left(N: tl.constexpr, BAND_AXIS: tl.constexpr):
    """Return where a merged band, along ``BAND_AXIS``, holds its left half."""
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    return row + column >= N - 1 if BAND_AXIS == 1 else row >= column


@triton.jit
def skew(left, right, N: tl.constexpr, BAND_AXIS: tl.constexpr):
    """Return the tile of two halves that are by (query, band) or by (band, key)."""
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    merged = tl.where(is_left(N, BAND_AXIS), left, right)
    return tl.gather(merged, (j - i - 1) & (N - 1), BAND_AXIS)


@triton.jit
def unskew(tile, N: tl.constexpr, BAND_AXIS: tl.constexpr):
    """Return the two halves of a tile, zeros where it has no element: :func:`skew` transposed."""
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    source = i + j + 1 if BAND_AXIS == 1 else j - i - 1
    merged = tl.gather(tile, source & (N - 1), BAND_AXIS)
    left = is_left(N, BAND_AXIS)
    return tl.where(left, merged, 0.0), tl.where(left, 0.0, merged)


@triton.jit
def query_products(problem, x, table, head, m0, n0, N: tl.constexpr, W: tl.constexpr):
    """Return ``x_i . a_r`` of queries (or their gradients) ``(N, W)`` for a tile, ``(N, N)``."""
    left, right = load_band(problem, table, head, m0, n0, N, W)
    return skew(multiply(x, tl.trans(left)), multiply(x, tl.trans(right)), N, 1)


@triton.jit
def key_products(problem, x, table, head, m0, n0, N: tl.constexpr, W: tl.constexpr):
    """Return ``x_j . a_r`` of keys ``(N, W)`` for a tile, ``(N, N)``."""
    left, right = load_band(problem, table, head, m0, n0, N, W)
    return skew(multiply(left, tl.trans(x)), multiply(right, tl.trans(x)), N, 0)
