# ruff: noqa: ANN001, ANN201 (arguments of kernels have Triton's types)
"""One tile of M queries by N keys: its scores, masks and dropout.

In the forward pass, tiles have a row for each query; in the backward pass a row for each key
(flipped), so that they can be multiplied by queries without transposing them.

A vector table has a row for each distance, key minus query. The distances of a tile are M + N - 1
consecutive rows of it, the tile's *band*: pair (m, n) has the band's row M - 1 + n - m. One
matrix product gives every query (or key) times every row of the band, and a gather takes from it
the products of the tile's pairs. In tiles far from the diagonal, a clipped table has one row for
all pairs, and its term is a number for each query, or for each key.

- ``problem``: tensors, tables and sizes of a call: T queries, S keys; D: size of a head; G: heads,
  or 1 for all. CLIPPED: the rows at the ends of a vector table serve several distances.
- ``opt``: constants: M, N; W: D padded to a power of 2; FULL: no load needs a mask.
- ``table``: ``rows`` ``(G, R, D)`` or ``(G, R)``; ``low``, the distance of row 0; ``last``, R - 1.
- Sequence: index of a sentence and a head, ``batch * heads + head``.
- m, n: indices of queries ``(M, 1)``, of keys ``(1, N)``; FLIP: rows are keys, ``(1, M), (N, 1)``.
- PART: BEFORE for tiles far before the diagonal, AFTER for tiles far after it, NEAR for others.

Scores are here without the scale, so a bias is divided by it before it is added.
"""

import os

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BEFORE, AFTER, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FEW_ROWS = tl.constexpr(16)  # the fewest that `tl.dot` multiplies
# Triton's interpreter computes with numpy, which has no bfloat16 and no PTX.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
KEEP = tl.constexpr(  # kept = weight if multiplier * seed + offset < threshold else 0.0
    "{ .reg .pred kept; .reg .s32 hash; mad.lo.s32 hash, $2, $3, $4; "
    "setp.lt.s32 kept, hash, $5; selp.f32 $0, $1, 0f00000000, kept; }"
)


@triton.jit
def split_program(program, length, BLOCK: tl.constexpr):
    """Split a program's index: its sequence in the launch, from 0; the first row of its block."""
    blocks = tl.cdiv(length, BLOCK)
    return program // blocks, program % blocks * BLOCK


@triton.jit
def load_rows(problem, opt, base, start, count, ROWS: tl.constexpr):
    """Load ``(ROWS, W)``: rows from ``start`` on of ``(count, D)``, filled with zeros."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    if opt.FULL:  # T, S and D fill whole tiles, so no load needs a mask
        return tl.load(base + row * opt.W + column)
    else:
        inside = (row < count) & (column < problem.width)
        return tl.load(base + row * problem.width + column, mask=inside, other=0.0)


@triton.jit
def load_two_numbers(opt, pointers, inside, dtype: tl.constexpr):
    """Load two 32-bit numbers from each int64, the lower first, with half the instructions."""
    both = tl.load(pointers, None if opt.FULL else inside)
    low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def store_rows(problem, opt, base, x, start, count, ROWS: tl.constexpr):
    """Store ``(ROWS, W)`` as rows from ``start`` on of ``(count, D)``."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    inside = (row < count) & (column < problem.width)
    tl.store(base + row * problem.width + column, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def multiply(x, y, sums=None):
    """Multiply matrices, and add to sums of float32; float32 inputs keep nearly their precision."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, sums, input_precision="tf32x3")


@triton.jit
def load_table(problem, opt, table, head, row):
    """Load vectors ``(rows, W)`` at indices ``(rows,)``; beyond an end, the row there."""
    row = tl.minimum(tl.maximum(row, 0), table.last)[:, None]
    column = tl.arange(0, opt.W)[None, :]
    start = table.rows + head * table.head_stride  # 0 if all heads share the rows
    return tl.load(start + row * problem.width + column, column < problem.width, 0.0)


@triton.jit
def load_band(problem, opt, table, head, at):
    """Load the band of a tile, ``(size, W)``, from distance ``at`` on; the last rows are spare."""
    row = tl.arange(0, triton.next_power_of_2(opt.M + opt.N))
    first = at - table.low
    if opt.FULL and not problem.CLIPPED:  # all but the spare rows are rows of the table
        start = table.rows + head * table.head_stride + first * opt.W
        number = row[:, None] * opt.W + tl.arange(0, opt.W)[None, :]
        return tl.load(start + number, (row < opt.M + opt.N - 1)[:, None], 0.0)
    else:
        return load_table(problem, opt, table, head, first + row)


@triton.jit
def find_columns(problem, opt, batch, first_row, SIGN: tl.constexpr, PART: tl.constexpr = None):
    """Find the range of columns that a tile's rows may see, from a block's first column on.

    Rows are queries (SIGN 1) or keys (SIGN -1); PART, if given, limits the range to BEFORE, NEAR or
    AFTER. ``visible`` has the first and last column of every row, ``(B or 1, rows)``, ascending.
    """
    visible = problem.visible_keys if SIGN > 0 else problem.visible_queries
    count = problem.tgt_len if SIGN > 0 else problem.src_len
    rows: tl.constexpr = opt.M if SIGN > 0 else opt.N
    block: tl.constexpr = opt.N if SIGN > 0 else opt.M
    start, end = 0, problem.src_len if SIGN > 0 else problem.tgt_len
    if visible is not None:
        at = batch * visible.stride  # 0 if all sentences share the columns
        start = tl.load(visible.first + at + first_row) // block * block
        end = tl.load(visible.last + at + tl.minimum(first_row + rows, count) - 1) + 1
    if problem.CLIPPED and PART is not None:
        # Up to `far_low`, pairs have row 0; from `far_high` on, the last. Keys negate both.
        low = problem.far_low if SIGN > 0 else -problem.far_high
        high = problem.far_high if SIGN > 0 else -problem.far_low
        left = tl.maximum(first_row + low + 1, 0) // block * block
        left = tl.minimum(tl.maximum(left, start), end)  # tiles before it end at `low` or below
        right = tl.cdiv(tl.maximum(first_row + rows - 1 + high, 0), block) * block
        right = tl.minimum(tl.maximum(right, left), end)  # later tiles begin at `high` or above
        if PART == NEAR:
            start, end = left, right
        elif (BEFORE if SIGN > 0 else AFTER) == PART:  # for a query before a key, the key is after
            end = left
        else:
            start = right
    return start, end


@triton.jit
def apply_mask(problem, opt, scores, batch, m, n, first_query, first_key):
    """Set scores to -inf where a query m must not see a key n.

    Queries beyond the last one may get any scores: their results are not stored, and where the
    backward pass sums over queries, their weights are 0.
    """
    if problem.padding is not None:
        # The default 1 also hides the keys beyond the last one.
        padding = tl.load(problem.padding + batch * problem.src_len + n, n < problem.src_len, 1)
        scores = tl.where(padding == 0, scores, float("-inf"))
    elif not opt.FULL:
        scores = tl.where(n < problem.src_len, scores, float("-inf"))
    if problem.visible_keys is not None:
        first = problem.visible_keys.first + batch * problem.visible_keys.stride
        last = problem.visible_keys.last + batch * problem.visible_keys.stride
        # Most tiles lie within what all of their queries see: `first` and `last` never decrease.
        last_query = tl.minimum(first_query + opt.M, problem.tgt_len) - 1
        begins = first_key >= tl.load(first + last_query)
        ends = first_key + opt.N - 1 <= tl.load(last + first_query)
        if not (begins & ends):
            low = tl.load(first + m, m < problem.tgt_len, 0)
            high = tl.load(last + m, m < problem.tgt_len, 0)
            scores = tl.where((n >= low) & (n <= high), scores, float("-inf"))
    if problem.pairs is not None:  # `(T, S)`, 1 where a query must not see a key
        inside = (m < problem.tgt_len) & (n < problem.src_len)
        pairs = tl.load(problem.pairs + m.to(tl.int64) * problem.src_len + n, inside, 1)
        scores = tl.where(pairs == 0, scores, float("-inf"))
    return scores


@triton.jit
def drop_weights(problem, opt, weights, sequence, m, n):
    """Set the weights of a tile that dropout drops to 0.

    A pair's hash, ``multiplier * seed + offset``, is compared in PTX: with `tl.where`, the compiler
    packs the comparisons and unpacks them again, which costs more.
    """
    of_query = problem.dropout.query_seeds + sequence.to(tl.int64) * problem.tgt_len + m
    of_key = problem.dropout.key_seeds + sequence.to(tl.int64) * problem.src_len + n
    multiplier, offset = load_two_numbers(opt, of_query, m < problem.tgt_len, tl.int32)
    seed = tl.load(of_key, None if opt.FULL else n < problem.src_len)
    if INTERPRETED:
        return tl.where(multiplier * seed + offset < problem.dropout.threshold, weights, 0.0)
    else:
        arguments = [weights, multiplier, seed, offset, problem.dropout.threshold]
        return tl.inline_asm_elementwise(
            KEEP, "=r,r,r,r,r,r", arguments, dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gather_lines(x, start, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """Gather ``(rows, COLUMNS)`` from a flat list: each row from its start on, a step apart."""
    if not INTERPRETED:
        # Hides from the compiler how the starts are computed. It then addresses a row's numbers
        # relative to the start; otherwise it keeps an address for each of them in a register.
        start = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [start], dtype=tl.int32, is_pure=True, pack=1
        )
    rows: tl.constexpr = start.shape[0]
    index = start[:, None] + tl.arange(0, COLUMNS)[None, :] * STEP
    return tl.gather(x, index.reshape(rows * COLUMNS), 0).reshape(rows, COLUMNS)


@triton.jit
def multiply_table(
    problem, opt, table, x, head, at, ROWS: tl.constexpr, FLIP: tl.constexpr, PART: tl.constexpr
):
    """Multiply queries or keys ``(count, W)`` by the table rows of a tile's pairs.

    In tiles far from the diagonal, the result is a column or a row. ROWS: whether the vectors
    of ``x`` belong to the rows of the tile; otherwise, they belong to its columns.
    """
    if PART == NEAR:
        band = load_band(problem, opt, table, head, at)
        size: tl.constexpr = band.shape[0]
        rows: tl.constexpr = opt.N if FLIP else opt.M
        columns: tl.constexpr = opt.M if FLIP else opt.N
        SIGN: tl.constexpr = 1 if FLIP else -1  # by which the band's row grows from row to row
        row = tl.arange(0, rows)
        first = row * SIGN + (opt.M - 1)  # of the band, for the first pair of a tile's row
        if ROWS:
            products = multiply(x, tl.trans(band)).reshape(rows * size)
            return gather_lines(products, row * size + first, -SIGN, columns)
        else:
            products = multiply(band, tl.trans(x)).reshape(size * columns)  # row by row of the band
            return gather_lines(products, first * columns, 1 - SIGN * columns, columns)
    else:
        row = (0 if PART == BEFORE else table.last) + tl.zeros((FEW_ROWS,), tl.int32)
        ends = load_table(problem, opt, table, head, row)
        product = tl.max(multiply(x, tl.trans(ends)), 1)  # the maximum of equal columns
        return product[:, None] if ROWS else product[None, :]


@triton.jit
def load_numbers(opt, table, head, at, factor, FLIP: tl.constexpr):
    """Load the numbers of a table, times a factor, for the pairs of a tile."""
    row = at - table.low + tl.arange(0, triton.next_power_of_2(opt.M + opt.N))
    inside = (row >= 0) & (row <= table.last)  # all distances have a row; pairs need no other
    band = tl.load(table.rows + head * table.head_stride + row, mask=inside, other=0.0)
    if FLIP:
        return gather_lines(band * factor, tl.arange(0, opt.N) + (opt.M - 1), -1, opt.M)
    else:
        return gather_lines(band * factor, tl.arange(0, opt.M) * -1 + (opt.M - 1), 1, opt.N)


@triton.jit
def compute_scores(
    problem, opt, q, k, head, first_query, first_key, FLIP: tl.constexpr, PART: tl.constexpr
):
    """Compute content, gain, query term, key term and score of a tile's pairs.

    A missing gain or term is 1. Without a gain, content may have added terms: only score is read.
    """
    at = first_key - first_query - opt.M + 1  # distance of the band's first row
    gain, query_term, key_term = 1.0, 1.0, 1.0
    # The terms of tables come first, because computing them takes the most registers.
    if problem.query_table is not None:
        table = problem.query_table
        query_term = multiply_table(problem, opt, table, q, head, at, not FLIP, FLIP, PART)
    if problem.key_table is not None:
        table = problem.query_table if problem.SHARED else problem.key_table  # one table for both
        key_term = multiply_table(problem, opt, table, k, head, at, FLIP, FLIP, PART)
    if problem.gain is not None:
        gain = load_numbers(opt, problem.gain, head, at, 1.0, FLIP)
    x, y = (k, tl.trans(q)) if FLIP else (q, tl.trans(k))  # rows and columns of the tile
    has_both: tl.constexpr = problem.query_table is not None and problem.key_table is not None
    has_vectors: tl.constexpr = problem.query_table is not None or problem.key_table is not None
    is_sum: tl.constexpr = has_vectors and not problem.PRODUCT  # else terms multiply the content
    term = query_term + key_term if has_both and is_sum else query_term * key_term
    if is_sum and PART == NEAR and problem.gain is None:
        content = multiply(x, y, term)  # saves registers
        score = content
    else:
        content = multiply(x, y)
        score = content * gain + term if is_sum else content * term * gain
    if problem.bias is not None:
        score += load_numbers(opt, problem.bias, head, at, 1 / problem.scale, FLIP)
    return content, gain, query_term, key_term, score
