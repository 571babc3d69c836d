# mypy: disable-error-code="no-untyped-def"
"""The first token's two rows inside the kernels, and tables of scalars, which need nothing else.

The first row is that of a query at the first token, the second that of a key there, seen from any
other query. Their products with vectors are made outside the kernels: two for each query or key.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_first(problem, batch, m0, n0, N: tl.constexpr):
    """Return where the first row ``(N, 1)`` and where the second row ``(N, N)`` applies."""
    first = problem.first + batch * problem.src_len
    m = m0 + problem.src_len - problem.tgt_len + tl.arange(0, N)[:, None]
    n = n0 + tl.arange(0, N)[None, :]
    from_first = tl.load(first + m, mask=m < problem.src_len, other=0) != 0
    to_first = tl.load(first + n, mask=n < problem.src_len, other=0) != 0
    return from_first, to_first & (from_first == 0)


@triton.jit
def load_pairs(pairs, start, count, N: tl.constexpr):
    """Return both columns of rows from ``start`` on of ``(count, 2)``, two of ``(N,)``."""
    row = start + tl.arange(0, N)
    here = tl.load(pairs + 2 * row, mask=row < count, other=0.0)
    return here, tl.load(pairs + 2 * row + 1, mask=row < count, other=0.0)


@triton.jit
def store_pairs(pairs, here, there, start, count, N: tl.constexpr):
    """Store two of ``(N,)`` as rows from ``start`` on of ``(count, 2)``."""
    row = start + tl.arange(0, N)
    tl.store(pairs + 2 * row, here, mask=row < count)
    tl.store(pairs + 2 * row + 1, there, mask=row < count)


@triton.jit
def reset_by_query(problem, tile, pairs, sequence, m0, n0, N: tl.constexpr):
    """Return a tile with the reset's products, ``(B, H, T, 2)``, where they apply."""
    if problem.first is not None:
        from_first, to_first = load_first(problem, sequence // problem.heads, m0, n0, N)
        pairs += sequence.to(tl.int64) * problem.tgt_len * 2
        first, second = load_pairs(pairs, m0, problem.tgt_len, N)
        tile = tl.where(to_first, second[:, None], tile)
        tile = tl.where(from_first, first[:, None], tile)
    return tile


@triton.jit
def reset_by_key(problem, tile, pairs, sequence, m0, n0, N: tl.constexpr):
    """Return a tile with the reset's products, ``(B, H, S, 2)``, where they apply."""
    if problem.first is not None:
        from_first, to_first = load_first(problem, sequence // problem.heads, m0, n0, N)
        pairs += sequence.to(tl.int64) * problem.src_len * 2
        first, second = load_pairs(pairs, n0, problem.src_len, N)
        tile = tl.where(to_first, second[None, :], tile)
        tile = tl.where(from_first, first[None, :], tile)
    return tile


@triton.jit
def split_reset(problem, grad, first, second, batch, m0, n0, AXIS: tl.constexpr, N: tl.constexpr):
    """Return the gradient by distance, and those of the two rows added to ``first, second``."""
    if problem.first is not None:
        from_first, to_first = load_first(problem, batch, m0, n0, N)
        first += tl.sum(tl.where(from_first, grad, 0.0), AXIS)
        second += tl.sum(tl.where(to_first, grad, 0.0), AXIS)
        grad = tl.where(from_first | to_first, 0.0, grad)
    return grad, first, second


@triton.jit
def by_distance(problem, table, batch, head, m0, n0, N: tl.constexpr):
    """Return the scalars of a table for a tile, ``(N, N)`` of float32."""
    m = m0 + tl.arange(0, N)[:, None]
    n = n0 + tl.arange(0, N)[None, :]
    row = n - m + problem.tgt_len - 1
    if problem.first is not None:
        from_first, to_first = load_first(problem, batch, m0, n0, N)
        end = problem.tgt_len + problem.src_len - 1
        row = tl.where(from_first, end, tl.where(to_first, end + 1, row))
    inside = (m < problem.tgt_len) & (n < problem.src_len)
    rows = table.rows + head * table.head_stride
    return tl.load(rows + row, mask=inside, other=0.0).to(tl.float32)
