# ruff: noqa: ANN001, ANN201
"""The backward pass for keys and values: one program for each block of them, over all queries.

It computes the scores again, and stores the gradients of their parts tile by tile. Matrix products
of these tiles then give the gradients of queries and tables
(:mod:`~fairseq_posenc.backends.triton.stored`).

``saved``, ``slab`` and ``tiles`` are NamedTuples of
:mod:`~fairseq_posenc.backends.triton.gradients`; other arguments of functions are those of
:mod:`~fairseq_posenc.backends.triton.tiles`. Kept weights are 0 where dropout drops them, and lack
its factor 1 / (1 - p).
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.tiles import (
    AFTER,
    BEFORE,
    NEAR,
    add_product,
    apply_mask,
    compute_scores,
    drop_weights,
    find_queries,
    load_rows,
    multiply,
    split_program,
    store_rows,
)

FLIP = tl.constexpr(True)  # rows of tiles are keys


@triton.jit
def select_queries(problem, opt, start, end, first_key, PART: tl.constexpr):
    """Select the queries for which the keys are far before them, far after them, or in between."""
    if opt.CLIPPED:
        right = tl.maximum(first_key - problem.far_high + 1, 0) // opt.M * opt.M
        right = tl.minimum(tl.maximum(right, start), end)  # tiles up to it begin at far_high or on
        left = tl.maximum(first_key + opt.N - 1 - problem.far_low, 0)
        left = tl.minimum(tl.maximum(tl.cdiv(left, opt.M) * opt.M, right), end)
        if PART == AFTER:
            end = right
        elif PART == BEFORE:
            start = left
        else:
            start, end = right, left
    return start, end


@triton.jit
def compute_score_gradients(problem, opt, saved, scores, grad_weight, sequence, m, n):
    """Compute the kept weights P' and the gradients dS of the scores, ``(keys N, queries M)``.

    As in FlashAttention, dS = P' dP / (1 - p) - P delta, for the gradients dP of the weights. Here,
    dS is multiplied by the scale. All parts of the scores need it but a bias, whose gradient is
    divided by the scale at the end.
    """
    queries = sequence.to(tl.int64) * problem.tgt_len
    inside = m < problem.tgt_len
    log_sum = tl.load(saved.log_sums + queries + m, inside, float("inf"))
    weights = tl.exp2(scores - log_sum)  # scores and sums are in units of log2
    delta = tl.load(saved.delta + queries + m, inside, 0.0)
    kept = weights
    if problem.dropout is not None:
        kept = drop_weights(problem, opt, weights, sequence, m, n)
    return kept, (kept * (grad_weight * problem.kept_factor) - weights * delta) * problem.scale


@triton.jit
def store_tile(tiles, tile, slab, sequence_in_slab, row, column, stride):
    """Store a tile at rows and columns; memory is allocated for whole tiles."""
    start = tiles + sequence_in_slab.to(tl.int64) * slab.queries * slab.keys
    tl.store(start + row.to(tl.int64) * stride + column, tile.to(tiles.dtype.element_ty))


@triton.jit
def store_terms(opt, slab, tiles, parts, grad, sequence_in_slab, m, row):
    """Store the gradients of all parts but the content, if ``tiles`` has them.

    A part that is missing is 1 or 0, whichever changes nothing (``compute_table_terms``).
    """
    content, gain, query_term, key_term = parts
    if tiles.bias is not None:
        store_tile(tiles.bias, grad, slab, sequence_in_slab, m, row, slab.keys)
    if tiles.gain is not None:
        tile = grad * content * query_term * key_term if opt.PRODUCT else grad * content
        store_tile(tiles.gain, tile, slab, sequence_in_slab, m, row, slab.keys)
    if tiles.query_term is not None:
        tile = grad * content * gain * key_term if opt.PRODUCT else grad
        store_tile(tiles.query_term, tile, slab, sequence_in_slab, m, row, slab.keys)
    if tiles.key_term is not None:
        tile = grad * content * gain * query_term if opt.PRODUCT else grad
        store_tile(tiles.key_term, tile, slab, sequence_in_slab, row, m, slab.queries)


@triton.jit
def backward_kernel(problem, opt, saved, slab, tiles, grad_key, grad_value):
    """Write the tiles, and the gradients of values and of keys without their table's term."""
    sequence_in_slab, first_row = split_program(tl.program_id(0), slab.keys, opt.N)
    sequence = slab.sequence + sequence_in_slab
    first_key = slab.first_key + first_row
    batch, head = sequence // problem.heads, sequence % problem.heads
    query = problem.query + sequence.to(tl.int64) * problem.tgt_len * problem.width
    grads = saved.grad + sequence.to(tl.int64) * problem.tgt_len * problem.width
    keys = sequence.to(tl.int64) * problem.src_len * problem.width
    # [keys N, W] each
    k = load_rows(problem, opt, problem.key + keys, first_key, problem.src_len, opt.N)
    v = load_rows(problem, opt, problem.value + keys, first_key, problem.src_len, opt.N)
    row = first_row + tl.arange(0, opt.N)[:, None]  # [keys N, 1]
    n = slab.first_key + row
    grad_k = tl.zeros((opt.N, opt.W), tl.float32)
    grad_v = tl.zeros((opt.N, opt.W), tl.float32)
    first_visible, visible_end = find_queries(problem, batch, first_key, opt.N, opt.M)
    for part in tl.static_range(3):
        if opt.CLIPPED or part == NEAR:
            start, end = select_queries(problem, opt, first_visible, visible_end, first_key, part)
            for first_query in range(start, end, opt.M):
                m = first_query + tl.arange(0, opt.M)[None, :]  # [1, queries M]
                # [queries M, W]
                q = load_rows(problem, opt, query, first_query, problem.tgt_len, opt.M)
                content, gain, query_term, key_term, scores = compute_scores(
                    problem, opt, q, k, head, first_query, first_key, FLIP, part
                )
                scores = apply_mask(problem, opt, scores, batch, m, n)
                # [queries M, W], loaded late to save registers.
                grad = load_rows(problem, opt, grads, first_query, problem.tgt_len, opt.M)
                grad_weight = multiply(v, tl.trans(grad))  # [keys N, queries M]
                kept, grad_score = compute_score_gradients(
                    problem, opt, saved, scores, grad_weight, sequence, m, n
                )
                grad_v = add_product(grad_v, kept.to(v.dtype), grad)
                parts = content, gain, query_term, key_term
                store_terms(opt, slab, tiles, parts, grad_score, sequence_in_slab, m, row)
                tile = grad_score * gain
                tile = (tile * query_term * key_term if opt.PRODUCT else tile).to(q.dtype)
                store_tile(tiles.content, tile, slab, sequence_in_slab, m, row, slab.keys)
                grad_k = add_product(grad_k, tile, q)
    store_rows(problem, opt, grad_key + keys, grad_k, first_key, problem.src_len, opt.N)
    grad_v *= problem.kept_factor
    store_rows(problem, opt, grad_value + keys, grad_v, first_key, problem.src_len, opt.N)
