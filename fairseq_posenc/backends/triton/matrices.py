# ruff: noqa: ANN001, ANN201
"""Loads, stores and multiplies matrices of N rows and W columns inside the kernels.

N, side of a tile; W, power of 2 that the width of a head is padded to.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter computes with numpy, which has no bfloat16: there, inputs become float32.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_rows(base, start, count, width, FULL: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Load ``(N, W)``: rows from ``start`` on of ``(count, width)`` at ``base``, filled with zeros.

    ``FULL`` promises that all N rows exist and that ``width`` is W, so no load needs a mask.
    """
    row = start + tl.arange(0, N)[:, None]
    column = tl.arange(0, W)[None, :]
    if FULL:
        return tl.load(base + row * W + column)
    inside = (row < count) & (column < width)
    return tl.load(base + row * width + column, mask=inside, other=0.0)


@triton.jit
def store_rows(base, x, start, count, width, N: tl.constexpr, W: tl.constexpr):
    """Store ``(N, W)`` as rows from ``start`` on of ``(count, width)`` at ``base``."""
    row = start + tl.arange(0, N)[:, None]
    column = tl.arange(0, W)[None, :]
    inside = (row < count) & (column < width)
    tl.store(base + row * width + column, x.to(base.dtype.element_ty), mask=inside)


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
def add_split_product(sums, x, y):
    """Add the product of a float32 and a half precision matrix with little rounding.

    The float32 matrix is split into two of half precision, as 1.001 = 1.0 + 0.001.
    """
    high = x.to(y.dtype)
    sums = add_product(sums, high, y)
    if y.dtype != tl.float32:
        sums = add_product(sums, (x - high.to(tl.float32)).to(y.dtype), y)
    return sums
