# ruff: noqa: ANN001, ANN201 (arguments of kernels have Triton's types)
"""One tile of M queries by N keys: its scores, masks and dropout.

In the forward pass, tiles have a row for each query; in the backward pass a row for each key
(flipped), so that they can be multiplied by queries without transposing them.

A vector table has a row for each distance, key minus query. The distances of a tile are M + N - 1
consecutive rows of it, the tile's *band*: pair (m, n) of the tile has the band's row M + n - m. One
matrix product gives every query (or key) times every row of the band, and a gather takes from it
the products of the tile's pairs. In tiles far from the diagonal, a clipped table has one row for
all pairs, and its term is a number for each query, or for each key.

- ``problem``: a :class:`~fairseq_posenc.backends.triton.problem.Problem`.
- ``opt``: :class:`~fairseq_posenc.backends.triton.sizes.Options`, with M, N and W.
- Sequence: index of a sentence and a head.
- m, n: indices of queries and of keys, ``(M, 1)`` and ``(1, N)``; flipped ``(1, M)``, ``(N, 1)``.
- FLIP: whether rows of tiles are keys.
- PART: BEFORE for tiles far before the diagonal, AFTER for tiles far after it, else NEAR.
"""

import os

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BEFORE, AFTER, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FEW_ROWS = tl.constexpr(16)  # the fewest that `tl.dot` multiplies
# Triton's interpreter computes with numpy, which has no bfloat16 and no PTX.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
KEEP = tl.constexpr(
    "{ .reg .pred kept; .reg .s32 hash; mad.lo.s32 hash, $2, $3, $4; "
    "setp.lt.s32 kept, hash, $5; selp.f32 $0, $1, 0f00000000, kept; }"
)


@triton.jit
def split_program(program, length, BLOCK: tl.constexpr):
    """Split a program's index into a sequence, counted in this launch, and its first row."""
    blocks = tl.cdiv(length, BLOCK)
    return program // blocks, program % blocks * BLOCK


@triton.jit
def load_rows(problem, opt, base, start, count, ROWS: tl.constexpr):
    """Load ``(ROWS, W)``: rows from ``start`` on of ``(count, D)``, filled with zeros."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    if opt.FULL:
        return tl.load(base + row * opt.W + column)
    else:
        inside = (row < count) & (column < problem.width)
        return tl.load(base + row * problem.width + column, mask=inside, other=0.0)


@triton.jit
def store_rows(problem, opt, base, x, start, count, ROWS: tl.constexpr):
    """Store ``(ROWS, W)`` as rows from ``start`` on of ``(count, D)``."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    inside = (row < count) & (column < problem.width)
    tl.store(base + row * problem.width + column, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def multiply(x, y):
    """Multiply matrices in float32; float32 inputs are not rounded to TF32."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def add_product(sums, x, y):
    """Add one more matrix product to sums of float32."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, sums, input_precision="tf32x3")


@triton.jit
def load_table(problem, opt, table, head, row):
    """Load vectors ``(rows, W)`` at indices ``(rows,)``; beyond an end, the row there."""
    row = tl.minimum(tl.maximum(row, 0), table.last)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    start = table.rows + head * table.head_stride
    return tl.load(start + row * problem.width + column, column < problem.width, 0.0)


@triton.jit
def find_keys(problem, batch, first_query, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the first block's key, and the end of the keys, that ``ROWS`` queries may see."""
    start = 0
    end = problem.src_len
    if problem.ranges is not None:
        ranges = batch * problem.range_strides[0]
        last_query = tl.minimum(first_query + ROWS, problem.tgt_len) - 1
        start = tl.load(problem.ranges.first_keys + ranges + first_query) // BLOCK * BLOCK
        end = tl.load(problem.ranges.last_keys + ranges + last_query) + 1
    return start, end


@triton.jit
def find_queries(problem, batch, first_key, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the first block's query, and the end of the queries, that may see ``ROWS`` keys."""
    start = 0
    end = problem.tgt_len
    if problem.ranges is not None:
        ranges = batch * problem.range_strides[1]
        last_key = tl.minimum(first_key + ROWS, problem.src_len) - 1
        start = tl.load(problem.ranges.first_queries + ranges + first_key) // BLOCK * BLOCK
        end = tl.load(problem.ranges.last_queries + ranges + last_key) + 1
    return start, end


@triton.jit
def apply_mask(problem, opt, scores, batch, m, n):
    """Set scores to -inf where a query m must not see a key n.

    Queries beyond the last one are left as they are: their results are not stored, and where the
    backward pass sums over queries, their weights are 0.
    """
    if problem.padding is not None:
        # The default 1 also hides the keys beyond the last one.
        padding = tl.load(problem.padding + batch * problem.src_len + n, n < problem.src_len, 1)
        scores = tl.where(padding == 0, scores, float("-inf"))
    elif not opt.FULL:
        scores = tl.where(n < problem.src_len, scores, float("-inf"))
    if problem.ranges is not None:
        ranges = batch * problem.range_strides[0] + m
        low = tl.load(problem.ranges.first_keys + ranges, m < problem.tgt_len, 0)
        high = tl.load(problem.ranges.last_keys + ranges, m < problem.tgt_len, 0)
        scores = tl.where((n >= low) & (n <= high), scores, float("-inf"))
    if problem.pairs is not None:
        inside = (m < problem.tgt_len) & (n < problem.src_len)
        pairs = tl.load(problem.pairs + m.to(tl.int64) * problem.src_len + n, inside, 1)
        scores = tl.where(pairs == 0, scores, float("-inf"))
    return scores


@triton.jit
def drop_weights(problem, opt, weights, sequence, m, n):
    """Set the weights of a tile that dropout drops to 0.

    The hash of :class:`~fairseq_posenc.backends.triton.problem.Dropout` is compared in PTX: from
    `tl.where`, the compiler packs 32 comparisons into a byte and unpacks them, 8 instructions.
    """
    query_start = sequence.to(tl.int64) * problem.tgt_len
    key_start = sequence.to(tl.int64) * problem.src_len
    inside_m = None if opt.FULL else m < problem.tgt_len
    inside_n = None if opt.FULL else n < problem.src_len
    multiplier = tl.load(problem.dropout.multipliers + query_start + m, inside_m)
    offset = tl.load(problem.dropout.offsets + query_start + m, inside_m)
    seed = tl.load(problem.dropout.key_seeds + key_start + n, inside_n)
    if INTERPRETED:
        return tl.where(multiplier * seed + offset < problem.keep_threshold, weights, 0.0)
    else:
        arguments = [weights, multiplier, seed, offset, problem.keep_threshold]
        return tl.inline_asm_elementwise(
            KEEP, "=r,r,r,r,r,r", arguments, dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gather_flat(x, index):
    """Gather numbers of a flat list at indices ``(rows, columns)``."""
    gathered = tl.gather(x, index.reshape(index.shape[0] * index.shape[1]), 0)
    return gathered.reshape(index.shape[0], index.shape[1])


@triton.jit
def index_band(opt, FLIP: tl.constexpr):
    """Compute the band's row of each pair of a tile, ``(M, N)``; ``(N, M)`` if flipped."""
    m, n = tl.arange(0, opt.M), tl.arange(0, opt.N)
    return n[:, None] - m[None, :] + opt.M if FLIP else n[None, :] - m[:, None] + opt.M


@triton.jit
def multiply_band(x, band, index, ROWS: tl.constexpr):
    """Multiply queries or keys with the table rows of their pairs, for a tile.

    Args:
        x: queries or keys, ``(count, W)``.
        band: ``(size, W)``.
        index: the band's row of each pair of the tile.
        ROWS: whether each of ``x`` has a row of the tile, else it has a column.
    """
    count: tl.constexpr = x.shape[0]
    size: tl.constexpr = band.shape[0]
    if ROWS:
        products = multiply(x, tl.trans(band)).reshape(count * size)  # of [count, size]
        return gather_flat(products, tl.arange(0, count)[:, None] * size + index)
    else:
        products = multiply(band, tl.trans(x)).reshape(size * count)  # of [size, count]
        return gather_flat(products, index * count + tl.arange(0, count)[None, :])


@triton.jit
def multiply_end(problem, opt, table, x, head, PART: tl.constexpr):
    """Multiply queries or keys with the row at an end of a table: ``(count,)``."""
    row = (0 if PART == BEFORE else table.last) + tl.zeros((FEW_ROWS,), tl.int32)
    rows = load_table(problem, opt, table, head, row)
    return tl.max(multiply(x, tl.trans(rows)), 1)  # all columns are equal


@triton.jit
def compute_table_terms(
    problem, opt, q, k, head, first_query, first_key, FLIP: tl.constexpr, PART: tl.constexpr
):
    """Compute the query and key terms of a tile; one that is missing is 1 or 0.

    In tiles far from the diagonal they are a column or a row.
    """
    query_term = 1.0 if opt.PRODUCT else 0.0
    key_term = 1.0 if opt.PRODUCT else 0.0
    if PART == NEAR:
        size: tl.constexpr = triton.next_power_of_2(opt.M + opt.N)
        distance = first_key - first_query - opt.M + tl.arange(0, size)
        index = index_band(opt, FLIP)
        if problem.query_table is not None:
            row = distance - problem.query_table.low
            band = load_table(problem, opt, problem.query_table, head, row)
            query_term = multiply_band(q, band, index, ROWS=not FLIP)
        if problem.key_table is not None:
            if not opt.SHARED:
                row = distance - problem.key_table.low
                band = load_table(problem, opt, problem.key_table, head, row)
            key_term = multiply_band(k, band, index, ROWS=FLIP)
    else:
        if problem.query_table is not None:
            query_end = multiply_end(problem, opt, problem.query_table, q, head, PART)  # [M]
            query_term = query_end[None, :] if FLIP else query_end[:, None]
        if problem.key_table is not None:
            key_end = multiply_end(problem, opt, problem.key_table, k, head, PART)  # [N]
            key_term = key_end[:, None] if FLIP else key_end[None, :]
    return query_term, key_term


@triton.jit
def load_scalars(opt, table, head, first_query, first_key, FLIP: tl.constexpr):
    """Load the numbers of a table for the pairs of a tile."""
    size: tl.constexpr = triton.next_power_of_2(opt.M + opt.N)
    row = first_key - first_query - opt.M - table.low + tl.arange(0, size)
    inside = (row >= 0) & (row <= table.last)
    band = tl.load(table.rows + head * table.head_stride + row, mask=inside, other=0.0)
    return gather_flat(band, index_band(opt, FLIP))


@triton.jit
def compute_scores(
    problem, opt, q, k, head, first_query, first_key, FLIP: tl.constexpr, PART: tl.constexpr
):
    """Compute content, gain, query term, key term and score of a tile's pairs.

    Scores are multiplied by log2(e), so that exponentials are powers of 2.
    """
    # The terms of tables come first, because computing them takes the most registers.
    query_term, key_term = compute_table_terms(
        problem, opt, q, k, head, first_query, first_key, FLIP, PART
    )
    gain = 1.0
    if problem.gain is not None:
        gain = load_scalars(opt, problem.gain, head, first_query, first_key, FLIP)
    x, y = (k, q) if FLIP else (q, k)  # rows and columns of the tile
    has_vectors: tl.constexpr = problem.query_table is not None or problem.key_table is not None
    if has_vectors and PART == NEAR and not opt.PRODUCT and problem.gain is None:
        content = add_product(query_term + key_term, x, tl.trans(y))  # saves registers
        score = content
    else:
        content = multiply(x, tl.trans(y))
        score = content * gain
        score = score * query_term * key_term if opt.PRODUCT else score + query_term + key_term
    score *= problem.scale * LOG2_E
    if problem.bias is not None:
        score += load_scalars(opt, problem.bias, head, first_query, first_key, FLIP) * LOG2_E
    return content, gain, query_term, key_term, score
