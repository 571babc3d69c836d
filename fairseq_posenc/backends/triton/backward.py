# ruff: noqa: ANN001, ANN201
"""The backward pass for keys and values: one program for each block of them, over all queries.

It computes the scores again, and stores the gradients of their parts tile by tile. Matrix products
of these tiles then give the gradients of queries and tables
(:mod:`~fairseq_posenc.backends.triton.stored`).

``problem``, ``saved``, ``layout`` and ``tiles`` are NamedTuples of
:mod:`~fairseq_posenc.backends.triton.problem`; the compile-time options are those of
:mod:`~fairseq_posenc.backends.triton.tiles`. Sequence: one head of one sentence. m, n: indices of
queries and of keys. Kept weights are 0 where dropout drops them, and lack its factor 1 / (1 - p).
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.matrices import multiply, store_rows
from fairseq_posenc.backends.triton.relative_shift import load_band, multiply_band
from fairseq_posenc.backends.triton.tiles import (
    apply_mask,
    combine_parts,
    compute_parts,
    find_block,
    find_queries,
    is_kept,
    load_block,
)

FLIP = tl.constexpr(True)  # rows of tiles are keys


@triton.jit
def compute_weight_gradients(
    problem, grad, v, head, first_query, first_key, N: tl.constexpr, W: tl.constexpr
):
    """Compute the gradients of the weights, ``(keys N, queries N)``."""
    grad_weight = multiply(v, tl.trans(grad))  # [keys N, queries N]
    if problem.value_table is not None:
        band = load_band(problem, problem.value_table, head, first_query, first_key, N, W)
        grad_weight += multiply_band(grad, band, ROWS=False, N=N, FLIP=FLIP)
    return grad_weight


@triton.jit
def compute_score_gradients(
    problem, saved, scores, grad_weight, sequence, m, n, FULL: tl.constexpr
):
    """Compute the kept weights P' and the gradients dS of the scores, ``(keys N, queries N)``.

    As in FlashAttention, dS = P' dP / (1 - p) - P delta, for the gradients dP of the weights. Here,
    dS is multiplied by the scale, which ``saved.delta`` includes. All parts of the scores need it
    but a bias, whose gradient is divided by the scale at the end (``gradients.py``).
    """
    queries = sequence.to(tl.int64) * problem.tgt_len
    inside = m < problem.tgt_len
    log_sum = tl.load(saved.log_sums + queries + m, inside, float("inf"))
    weights = tl.exp2(scores - log_sum)  # scores and sums are in units of log2
    delta = tl.load(saved.delta + queries + m, inside, 0.0)
    factor = problem.scale * problem.dropout_scale
    if problem.dropout is not None:
        kept = tl.where(is_kept(problem, sequence, m, n, FULL), weights, 0.0)
        return kept, kept * grad_weight * factor - weights * delta
    else:
        return weights, weights * (grad_weight * factor - delta)


@triton.jit
def store_tile(tiles, tile, sequence_in_slab, row, column, rows, stride, N: tl.constexpr):
    """Store ``(N, N)`` at a row and a column of a sequence's tiles, behind the row's N zeros.

    Memory is allocated for whole tiles, so that no bounds are needed.
    """
    i = row + tl.arange(0, N)[:, None]
    j = column + N + tl.arange(0, N)[None, :]
    start = tiles + (sequence_in_slab.to(tl.int64) * rows) * stride
    tl.store(start + i * stride + j, tile.to(tiles.dtype.element_ty))


@triton.jit
def store_transposed(
    tiles, tile, layout, sequence_in_slab, first_query, first_key, N: tl.constexpr
):
    """Store a tile ``(keys N, queries N)`` transposed."""
    tile = tl.trans(tile.to(tiles.dtype.element_ty))  # [queries N, keys N]
    column = first_key - layout.start
    stride = layout.query_stride
    store_tile(tiles, tile, sequence_in_slab, first_query, column, layout.queries, stride, N)


@triton.jit
def store_terms(
    tiles,
    layout,
    parts,
    grad,
    sequence_in_slab,
    first_query,
    first_key,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
):
    """Store the gradients of all parts but the content, if ``tiles`` has them.

    Each is stored as soon as it is computed, to save registers. A part that is missing is 1 or 0,
    whichever changes nothing (``compute_parts``).
    """
    content, gain, query_term, key_term = parts
    if tiles.query_term is not None:
        tile = grad * content * gain * key_term if PRODUCT else grad
        store_transposed(
            tiles.query_term, tile, layout, sequence_in_slab, first_query, first_key, N
        )
    if tiles.key_term is not None:
        row = first_key - layout.start
        stride = layout.key_stride
        tile = grad * content * gain * query_term if PRODUCT else grad
        store_tile(tiles.key_term, tile, sequence_in_slab, row, first_query, layout.keys, stride, N)
    if tiles.gain is not None:
        tile = grad * query_term * key_term * content if PRODUCT else grad * content
        store_transposed(tiles.gain, tile, layout, sequence_in_slab, first_query, first_key, N)
    if tiles.bias is not None:
        store_transposed(tiles.bias, grad, layout, sequence_in_slab, first_query, first_key, N)


@triton.jit(do_not_specialize=["first_sequence"])
def backward_kernel(
    problem,
    saved,
    first_sequence,
    layout,
    tiles,
    grad_key,
    grad_value,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    SHARED_TABLE: tl.constexpr,
    FULL: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write the tiles and, unless None, the gradients of keys and values, ``(B, H, S, D)``."""
    sequence_in_slab, row = find_block(layout.keys, N)
    sequence = first_sequence + sequence_in_slab
    first_key = layout.start + row
    batch, head = sequence // problem.heads, sequence % problem.heads
    # [keys N, W] each
    k = load_block(problem, problem.key, sequence, first_key, problem.src_len, FULL, N, W)
    v = load_block(problem, problem.value, sequence, first_key, problem.src_len, FULL, N, W)
    n = first_key + tl.arange(0, N)[:, None]  # [keys N, 1]
    grad_k = tl.zeros((N, W), tl.float32)
    grad_v = tl.zeros((N, W), tl.float32)
    start, end = find_queries(problem, first_key, DIRECTION, N)
    for first_query in range(start, end, N):
        m = first_query + tl.arange(0, N)[None, :]  # [1, queries N]
        # [queries N, W]
        q = load_block(problem, problem.query, sequence, first_query, problem.tgt_len, FULL, N, W)
        parts = compute_parts(
            problem, q, k, head, first_query, first_key, FLIP, PRODUCT, SHARED_TABLE, N, W
        )
        # [queries N, W], loaded late and used before the weights, so that fewer tiles are held.
        grad = load_block(problem, saved.grad, sequence, first_query, problem.tgt_len, FULL, N, W)
        grad_weight = compute_weight_gradients(problem, grad, v, head, first_query, first_key, N, W)
        scores = combine_parts(problem, parts, head, first_query, first_key, FLIP, PRODUCT, N)
        scores = apply_mask(problem, scores, batch, m, n, DIRECTION, FULL)
        kept, grad_score = compute_score_gradients(
            problem, saved, scores, grad_weight, sequence, m, n, FULL
        )
        if tiles.weights is not None:
            store_transposed(
                tiles.weights, kept, layout, sequence_in_slab, first_query, first_key, N
            )
        if grad_value is not None:
            grad_v += multiply(kept.to(v.dtype), grad)  # [keys N, W]
        store_terms(
            tiles, layout, parts, grad_score, sequence_in_slab, first_query, first_key, PRODUCT, N
        )
        _, gain, query_term, key_term = parts
        tile = grad_score * query_term * key_term * gain if PRODUCT else grad_score * gain
        tile = tile.to(q.dtype)
        store_transposed(tiles.content, tile, layout, sequence_in_slab, first_query, first_key, N)
        if grad_key is not None:
            grad_k += multiply(tile, q)  # [keys N, W]
    keys = sequence.to(tl.int64) * problem.src_len * problem.width
    if grad_key is not None:
        store_rows(grad_key + keys, grad_k, first_key, problem.src_len, problem.width, N, W)
    if grad_value is not None:
        grad_v *= problem.dropout_scale
        store_rows(grad_value + keys, grad_v, first_key, problem.src_len, problem.width, N, W)
