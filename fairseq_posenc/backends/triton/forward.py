# ruff: noqa: ANN001, ANN201
"""The forward pass: one program for each block of M queries, over all keys that they may see.

Source: the online softmax of FlashAttention (Dao et al. 2022). Scores are in units of log2
(`compute_scores` multiplies them by log2 e), so that exponentials are powers of 2.

The arguments of functions are those of :mod:`~fairseq_posenc.backends.triton.tiles`.
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
    find_keys,
    load_rows,
    split_program,
    store_rows,
)

FLIP = tl.constexpr(False)  # rows of tiles are queries
# log2 of the sum for a query that sees no key: far below any other, but finite, so that the
# backward pass computes weights of zero for it.
NO_SUM = tl.constexpr(-1e30)


@triton.jit
def online_softmax_step(scores, highest, total):
    """Update the running maximum and sum of each query, ``(M,)``, with scores ``(M, N)``.

    Returns the weights, the factor that rescales the sums so far, and the new maximum and sum.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])  # [M, N]
    rescale = tl.exp2(highest - shift)
    return weights, rescale, higher, total * rescale + tl.sum(weights, 1)


@triton.jit
def select_keys(problem, opt, start, end, first_query, PART: tl.constexpr):
    """Select the keys of one part: far before the queries, far after them, or in between.

    Far tiles have one row of every vector table for all of their pairs.
    """
    if opt.CLIPPED:
        left = tl.maximum(first_query + problem.far_low + 1, 0) // opt.N * opt.N
        left = tl.minimum(tl.maximum(left, start), end)  # tiles before it end at far_low or below
        right = tl.maximum(first_query + opt.M - 1 + problem.far_high, 0)
        right = tl.minimum(tl.maximum(tl.cdiv(right, opt.N) * opt.N, left), end)
        if PART == BEFORE:
            end = left
        elif PART == AFTER:
            start = right
        else:
            start, end = left, right
    return start, end


@triton.jit
def forward_kernel(problem, opt, attended, log_sums):
    """Write attended values ``(B, H, T, D)``, log2 of the sums of exponentials ``(B, H, T)``."""
    sequence, first_query = split_program(tl.program_id(0), problem.tgt_len, opt.M)
    batch, head = sequence // problem.heads, sequence % problem.heads
    queries = sequence.to(tl.int64) * problem.tgt_len
    keys = sequence.to(tl.int64) * problem.src_len * problem.width
    base = problem.query + queries * problem.width
    q = load_rows(problem, opt, base, first_query, problem.tgt_len, opt.M)  # [M, W]
    m = first_query + tl.arange(0, opt.M)[:, None]  # [M, 1]
    sums = tl.zeros((opt.M, opt.W), tl.float32)
    total = tl.zeros((opt.M,), tl.float32)
    highest = tl.full((opt.M,), float("-inf"), tl.float32)
    first_visible, visible_end = find_keys(problem, batch, first_query, opt.M, opt.N)
    for part in tl.static_range(3):
        if opt.CLIPPED or part == NEAR:
            start, end = select_keys(problem, opt, first_visible, visible_end, first_query, part)
            for first_key in range(start, end, opt.N):
                n = first_key + tl.arange(0, opt.N)[None, :]  # [1, N]
                # [N, W]
                k = load_rows(problem, opt, problem.key + keys, first_key, problem.src_len, opt.N)
                _, _, _, _, scores = compute_scores(
                    problem, opt, q, k, head, first_query, first_key, FLIP, part
                )
                # Masks come last: they are applied to the whole score, and never multiplied.
                scores = apply_mask(problem, opt, scores, batch, m, n)
                weights, rescale, highest, total = online_softmax_step(scores, highest, total)
                if problem.dropout is not None:  # dropped weights count in the softmax
                    weights = drop_weights(problem, opt, weights, sequence, m, n)
                # [N, W], loaded late to save registers.
                v = load_rows(problem, opt, problem.value + keys, first_key, problem.src_len, opt.N)
                sums = add_product(sums * rescale[:, None], weights.to(v.dtype), v)
    sees_no_key = total == 0.0  # [M]
    factor = tl.where(sees_no_key, 0.0, problem.kept_factor) / tl.where(sees_no_key, 1.0, total)
    rows = attended + queries * problem.width
    store_rows(problem, opt, rows, sums * factor[:, None], first_query, problem.tgt_len, opt.M)
    log_sum = tl.where(sees_no_key, NO_SUM, highest + tl.log2(tl.where(sees_no_key, 1.0, total)))
    at = first_query + tl.arange(0, opt.M)
    tl.store(log_sums + queries + at, log_sum, mask=at < problem.tgt_len)
