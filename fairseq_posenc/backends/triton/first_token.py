# mypy: disable-error-code="no-untyped-def"
"""The first token's two rows inside the kernels.

The first row is that of a query at the first token, the second that of a key there, seen from any
other query. Their products with vectors are made outside the kernels: two for each query or key.
Few tiles hold the first token. They come last, in a loop of their own, which alone looks closer: a
branch in a loop for all tiles would take registers from all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def near_range(problem, batch, row0, start, end, OF_QUERIES: tl.constexpr, N: tl.constexpr):
    """Return from where to where a program's tiles may hold the first token.

    Args:
        problem: the problem.
        batch: of the program.
        row0: the first of the program's queries (or keys).
        start: the first key (or query) of its first tile.
        end: one past those of its last tile.
        OF_QUERIES: whether a program has some queries and all keys.
        N: queries and keys of a tile.
    """
    low, high = end, end
    if problem.first is not None:
        query, key = first_places(problem, batch)
        own, other = (query, key) if OF_QUERIES else (key, query)
        every = (own >= row0) & (own < row0 + N)
        low = tl.where(every, start, tl.minimum(tl.maximum(other // N * N, start), end))
        high = tl.where(every, end, tl.minimum(low + N, end))
    return low, high


@triton.jit
def tile_at(problem, at, low, high, NEAR: tl.constexpr):
    """Return where a tile is: the far ones leave out the near range."""
    if problem.first is not None and not NEAR:
        at += tl.where(at >= low, high - low, 0)
    return at


@triton.jit
def first_places(problem, batch):
    """Return which query and which key the first token is; below zero or too high if none is."""
    key = tl.load(problem.first + batch)
    return key - (problem.src_len - problem.tgt_len), key


@triton.jit
def store_pairs(pairs, here, there, row, count):
    """Store two columns as rows of ``(count, 2)``."""
    tl.store(pairs + 2 * row, here, mask=row < count)
    tl.store(pairs + 2 * row + 1, there, mask=row < count)


@triton.jit
def load_column(pairs, row, count, COLUMN: tl.constexpr):
    """Return one column of rows of ``(count, 2)``."""
    return tl.load(pairs + 2 * row + COLUMN, mask=(row >= 0) & (row < count), other=0.0)


@triton.jit
def with_products(problem, tile, pairs, batch, m, n, OF_QUERIES: tl.constexpr):
    """Return a near tile with the reset's products where they apply.

    Args:
        problem: the problem.
        tile: of queries m by keys n, or the other way round.
        pairs: the products of this sequence, ``(T, 2)`` of queries or ``(S, 2)`` of keys.
        batch: of the tile.
        m: queries, as wide as the tile in one direction.
        n: keys, in the other.
        OF_QUERIES: whether the products are those of queries.
    """
    query, key = first_places(problem, batch)
    # The first token is one query and one key, of which a single number is needed.
    if OF_QUERIES:
        here = load_column(pairs, query, problem.tgt_len, 0)
        there = load_column(pairs, m, problem.tgt_len, 1)
    else:
        here = load_column(pairs, n, problem.src_len, 0)
        there = load_column(pairs, key, problem.src_len, 1)
    return tl.where(m == query, here, tl.where(n == key, there, tile))


@triton.jit
def with_scalars(problem, tile, table, batch, head, m, n):
    """Return a near tile of a table's scalars with the reset's two where they apply."""
    query, key = first_places(problem, batch)
    rows = table.rows + head * table.head_stride + problem.tgt_len + problem.src_len - 1
    return tl.where(m == query, tl.load(rows), tl.where(n == key, tl.load(rows + 1), tile))


@triton.jit
def take_weights(problem, weights, first, second, batch, m, n):
    """Return a near tile's weights by distance, and those of the two rows added to others."""
    query, key = first_places(problem, batch)
    taken = tl.where(m == query, weights, 0.0)
    first += tl.sum(taken, 1)
    weights -= taken
    taken = tl.where(n == key, weights, 0.0)
    return weights - taken, first, second + tl.sum(taken, 1)
