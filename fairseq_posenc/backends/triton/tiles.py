# ruff: noqa: ANN001, ANN201 (arguments of kernels have Triton's types)
"""One tile of N queries by N keys: its scores, masks and dropout.

In the forward pass, tiles have a row for each query; in the backward pass a row for each key
(flipped), so that they can be multiplied by queries without transposing them.

- ``problem``: a :class:`~fairseq_posenc.backends.triton.problem.Problem`.
- Sequence: index of a sentence and a head.
- Band: the table rows of a tile; see :mod:`~fairseq_posenc.backends.triton.relative_shift`.
- m, n: indices of queries and of keys, ``(N, 1)`` and ``(1, N)``; if flipped, the reverse.
- past: number of keys before the first query.

Compile-time options:

- DIRECTION: as in :class:`~fairseq_posenc.backends.mask.Mask`.
- FULL, N, W: see :func:`~fairseq_posenc.backends.triton.sizes.choose_options`.
- FLIP: rows of tiles are keys.
- PRODUCT: the parts of a score are multiplied, not added.
- SHARED_TABLE: queries and keys have one table.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.blocked import dropout
from fairseq_posenc.backends.triton.matrices import add_product, load_rows, multiply
from fairseq_posenc.backends.triton.relative_shift import load_band, load_scalars, multiply_band

LOG2_E = tl.constexpr(1.4426950408889634)
MURMUR_MULTIPLIER = tl.constexpr(dropout.MURMUR_MULTIPLIER)
XXHASH_MULTIPLIER = tl.constexpr(dropout.XXHASH_MULTIPLIER)


@triton.jit
def find_block(length, N: tl.constexpr):
    """Find a program's sequence, counted in this launch, and the first row of its N rows."""
    blocks = tl.cdiv(length, N)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * N


@triton.jit
def load_block(
    problem, x, sequence, first, length, FULL: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Load rows from ``first`` on of a sequence of ``x``, ``(B, H, length, D)``: ``(N, W)``."""
    start = sequence.to(tl.int64) * length * problem.width
    return load_rows(x + start, first, length, problem.width, FULL, N, W)


@triton.jit
def find_keys(problem, first_query, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Find the first key, and the end of the keys, that queries from ``first_query`` on may see."""
    past = problem.src_len - problem.tgt_len
    start = 0
    end = problem.src_len
    if DIRECTION == "lr":
        end = tl.minimum(end, first_query + N + past)
    if DIRECTION == "rl":
        start = (first_query + past) // N * N
    return start, end


@triton.jit
def find_queries(problem, first_key, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Find the first query, and the end of the queries, that may see keys from ``first_key`` on."""
    past = problem.src_len - problem.tgt_len
    start = 0
    end = problem.tgt_len
    if DIRECTION == "lr":
        start = tl.maximum(first_key - past, 0) // N * N
    if DIRECTION == "rl":
        end = tl.minimum(end, first_key + N - past)
    return start, end


@triton.jit
def apply_mask(problem, scores, batch, m, n, DIRECTION: tl.constexpr, FULL: tl.constexpr):
    """Set scores ``(N, N)`` to -inf where a query m must not see a key n.

    Queries beyond the last one are left as they are: their results are not stored, and where the
    backward pass sums over queries, their weights are 0.
    """
    past = problem.src_len - problem.tgt_len
    if problem.padding is not None:
        # The default 1 also hides the keys beyond the last one.
        padding = tl.load(problem.padding + batch * problem.src_len + n, n < problem.src_len, 1)
        scores = tl.where(padding == 0, scores, float("-inf"))
    elif not FULL:
        scores = tl.where(n < problem.src_len, scores, float("-inf"))
    if DIRECTION == "lr":
        scores = tl.where(n <= m + past, scores, float("-inf"))
    if DIRECTION == "rl":
        scores = tl.where(n >= m + past, scores, float("-inf"))
    if problem.pairs is not None:
        inside = (m < problem.tgt_len) & (n < problem.src_len)
        pairs = tl.load(problem.pairs + m.to(tl.int64) * problem.src_len + n, inside, 1)
        scores = tl.where(pairs == 0, scores, float("-inf"))
    return scores


@triton.jit
def is_kept(problem, sequence, m, n, FULL: tl.constexpr):
    """Compute which weights dropout keeps, ``(N, N)``, by the hash of ``blocked/dropout.py``.

    Seeds, hash and threshold are int32, with overflow: ``(((q ^ k) * MURMUR) ^ r) * XXHASH``.
    """
    query_start = sequence.to(tl.int64) * problem.tgt_len
    key_start = sequence.to(tl.int64) * problem.src_len
    inside_m = None if FULL else m < problem.tgt_len
    inside_n = None if FULL else n < problem.src_len
    bits = tl.load(problem.dropout.first_seeds + query_start + m, inside_m)
    bits = (bits ^ tl.load(problem.dropout.key_seeds + key_start + n, inside_n)) * MURMUR_MULTIPLIER
    bits = bits ^ tl.load(problem.dropout.second_seeds + query_start + m, inside_m)
    return bits * XXHASH_MULTIPLIER < problem.keep_threshold


@triton.jit
def compute_parts(
    problem,
    q,
    k,
    head,
    first_query,
    first_key,
    FLIP: tl.constexpr,
    PRODUCT: tl.constexpr,
    SHARED_TABLE: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Compute content, gain, query term and key term of the scores, ``(N, N)``.

    A missing part is 1 or 0, whichever changes nothing. If there is no gain and no product, the
    content includes the terms, which saves registers; :func:`combine_parts` then adds none.
    """
    gain = 1.0
    query_term = 1.0 if PRODUCT else 0.0
    key_term = 1.0 if PRODUCT else 0.0
    # The terms of tables come first, because computing them takes the most registers.
    if problem.query_table is not None:
        # [2N, W]; ROWS: queries have the rows of the tile, or if flipped its columns
        band = load_band(problem, problem.query_table, head, first_query, first_key, N, W)
        query_term = multiply_band(q, band, ROWS=not FLIP, N=N, FLIP=FLIP)  # [N, N]
    if problem.key_table is not None:
        if not SHARED_TABLE:
            band = load_band(problem, problem.key_table, head, first_query, first_key, N, W)
        key_term = multiply_band(k, band, ROWS=FLIP, N=N, FLIP=FLIP)  # [N, N]
    if problem.gain is not None:
        gain = load_scalars(problem, problem.gain, head, first_query, first_key, N, FLIP)  # [N, N]
    x, y = (k, q) if FLIP else (q, k)  # rows and columns of the tile
    no_tables: tl.constexpr = problem.query_table is None and problem.key_table is None
    if no_tables or PRODUCT or problem.gain is not None:
        content = multiply(x, tl.trans(y))  # [N, N]
    elif problem.key_table is None:
        content = add_product(query_term, x, tl.trans(y))
    elif problem.query_table is None:
        content = add_product(key_term, x, tl.trans(y))
    else:
        content = add_product(query_term + key_term, x, tl.trans(y))
    return content, gain, query_term, key_term


@triton.jit
def combine_parts(
    problem,
    parts,
    head,
    first_query,
    first_key,
    FLIP: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
):
    """Combine the parts of a tile's scores, times log2(e), so that exponentials are powers of 2."""
    content, gain, query_term, key_term = parts
    combined = content * gain
    if PRODUCT:
        combined = combined * query_term * key_term
    elif problem.gain is not None:  # else `compute_parts` has added the terms to the content
        if problem.query_table is not None:
            combined += query_term
        if problem.key_table is not None:
            combined += key_term
    combined *= problem.scale * LOG2_E
    if problem.bias is not None:
        combined += (
            load_scalars(problem, problem.bias, head, first_query, first_key, N, FLIP) * LOG2_E
        )
    return combined
