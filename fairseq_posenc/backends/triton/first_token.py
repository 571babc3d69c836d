# mypy: disable-error-code="no-untyped-def"
"""The first token's two rows inside the kernels.

The first row is that of a query at the first token, the second that of a key there, seen from any
other query. Their products with vectors are made outside the kernels: two for each query or key.
Few tiles hold the first token, and only those look at it closer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_near(problem, batch, m0, n0, N: tl.constexpr):
    """Return whether the first token is among the queries or the keys of a tile."""
    key = tl.load(problem.first + batch)
    query = key - (problem.src_len - problem.tgt_len)
    return ((query >= m0) & (query < m0 + N)) | ((key >= n0) & (key < n0 + N))


@triton.jit
def places(problem, batch, m, n):
    """Return where the first row and where the second row applies, for queries m and keys n."""
    key = tl.load(problem.first + batch)
    from_first = m == key - (problem.src_len - problem.tgt_len)
    return from_first & (n == n), (n == key) & (m == m) & (from_first == 0)


@triton.jit
def load_pairs(pairs, row, count):
    """Return both columns of rows of ``(count, 2)``."""
    here = tl.load(pairs + 2 * row, mask=row < count, other=0.0)
    return here, tl.load(pairs + 2 * row + 1, mask=row < count, other=0.0)


@triton.jit
def store_pairs(pairs, here, there, row, count):
    """Store two columns as rows of ``(count, 2)``."""
    tl.store(pairs + 2 * row, here, mask=row < count)
    tl.store(pairs + 2 * row + 1, there, mask=row < count)


@triton.jit
def with_products(problem, tile, pairs, batch, row, count, m, n, m0, n0, N: tl.constexpr):
    """Return a tile with the reset's products where they apply.

    Args:
        problem: the problem.
        tile: of queries m by keys n, or the other way round.
        pairs: the products of this sequence, ``(count, 2)``.
        batch: of the tile.
        row: of the products that each element needs: m for those of queries, n for those of keys.
        count: T or S.
        m: queries, as wide as the tile in one direction.
        n: keys, in the other.
        m0: the first query.
        n0: the first key.
        N: queries and keys of a tile.
    """
    if problem.first is not None:  # noqa: SIM102  (a compiler's condition, and the kernel's)
        if is_near(problem, batch, m0, n0, N):
            from_first, to_first = places(problem, batch, m, n)
            first, second = load_pairs(pairs, row, count)
            tile = tl.where(from_first, first, tl.where(to_first, second, tile))
    return tile


@triton.jit
def with_scalars(problem, tile, table, batch, head, m, n, m0, n0, N: tl.constexpr):
    """Return a tile of a table's scalars with the reset's two where they apply."""
    if problem.first is not None:  # noqa: SIM102  (a compiler's condition, and the kernel's)
        if is_near(problem, batch, m0, n0, N):
            from_first, to_first = places(problem, batch, m, n)
            rows = table.rows + head * table.head_stride + problem.tgt_len + problem.src_len - 1
            first, second = tl.load(rows), tl.load(rows + 1)
            tile = tl.where(from_first, first, tl.where(to_first, second, tile))
    return tile


@triton.jit
def take_weights(problem, weights, first, second, batch, m, n, m0, n0, N: tl.constexpr):
    """Return weights by distance, and those of the two rows added to ``first, second``."""
    if problem.first is not None:  # noqa: SIM102  (a compiler's condition, and the kernel's)
        if is_near(problem, batch, m0, n0, N):
            from_first, to_first = places(problem, batch, m, n)
            first += tl.sum(tl.where(from_first, weights, 0.0), 1)
            second += tl.sum(tl.where(to_first, weights, 0.0), 1)
            weights = tl.where(from_first | to_first, 0.0, weights)
    return weights, first, second
