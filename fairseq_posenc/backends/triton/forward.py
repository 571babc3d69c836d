# ruff: noqa: ANN001, ANN201
"""The forward pass: one program for each block of N queries, over all keys that they may see.

Source: the online softmax of FlashAttention (Dao et al. 2022). Scores are in units of log2
(`combine_parts` multiplies them by log2 e), so that exponentials are powers of 2.

Sequence: one head of one sentence. B batch, H heads, T queries, D head size, N side of a tile, W
power of 2 that D is padded to; m, n: indices of queries and of keys.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.matrices import add_split_product, store_rows
from fairseq_posenc.backends.triton.relative_shift import load_distances, mask_half, roll_rows
from fairseq_posenc.backends.triton.tiles import (
    apply_mask,
    combine_parts,
    compute_parts,
    find_block,
    find_keys,
    is_kept,
    load_block,
)

FLIP = tl.constexpr(False)  # rows of tiles are queries
# log2 of the sum for a query that sees no key: far below any other, but finite, so that the
# backward pass computes weights of zero for it.
NO_SUM = tl.constexpr(-1e30)


@triton.jit
def online_softmax_step(scores, highest, total):
    """Update the running maximum and sum of each query, ``(N,)``, with scores ``(N, N)``.

    Returns the weights, the factor that rescales the sums so far, and the new maximum and sum.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])  # [N, N]
    rescale = tl.exp2(highest - shift)
    return weights, rescale, higher, total * rescale + tl.sum(weights, 1)


@triton.jit
def add_values(
    problem, sums, weights, v, head, first_query, first_key, N: tl.constexpr, W: tl.constexpr
):
    """Add weights times values, and times rows of a value table, to ``(N, W)``."""
    sums = add_split_product(sums, weights, v)
    if problem.value_table is not None:
        rolled = roll_rows(weights, N)  # [N, N]
        # Column s has the pairs of distance s or, if they wrapped round, of distance s - N: first
        # those that did, then the others.
        for half in tl.static_range(2):
            distance = first_key - first_query + (half - 1) * N
            rows = load_distances(problem, problem.value_table, head, distance, N, N, W)  # [N, W]
            sums = add_split_product(sums, mask_half(rolled, half, N), rows)
    return sums


@triton.jit
def store_sums(
    problem,
    attended,
    log_sums,
    sums,
    total,
    highest,
    sequence,
    first_query,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Divide the summed values of a block of queries by their sums of exponentials; store both."""
    queries = sequence.to(tl.int64) * problem.tgt_len
    m = first_query + tl.arange(0, N)
    sees_no_key = total == 0.0  # [N]
    factor = tl.where(sees_no_key, 0.0, problem.dropout_scale) / tl.where(sees_no_key, 1.0, total)
    rows = attended + queries * problem.width
    store_rows(rows, sums * factor[:, None], first_query, problem.tgt_len, problem.width, N, W)
    log_sum = tl.where(sees_no_key, NO_SUM, highest + tl.log2(tl.where(sees_no_key, 1.0, total)))
    tl.store(log_sums + queries + m, log_sum, mask=m < problem.tgt_len)


@triton.jit
def forward_kernel(
    problem,
    attended,
    log_sums,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    SHARED_TABLE: tl.constexpr,
    FULL: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write attended values ``(B, H, T, D)``, log2 of the sums of exponentials ``(B, H, T)``.

    Attended values are summed in full precision: the backward pass subtracts nearly equal numbers.
    ``problem`` and the compile-time options are those of
    :mod:`~fairseq_posenc.backends.triton.tiles`.
    """
    sequence, first_query = find_block(problem.tgt_len, N)
    batch, head = sequence // problem.heads, sequence % problem.heads
    # [N, W]
    q = load_block(problem, problem.query, sequence, first_query, problem.tgt_len, FULL, N, W)
    m = first_query + tl.arange(0, N)[:, None]  # [N, 1]
    sums = tl.zeros((N, W), tl.float32)
    total = tl.zeros((N,), tl.float32)
    highest = tl.full((N,), float("-inf"), tl.float32)
    start, end = find_keys(problem, first_query, DIRECTION, N)
    for first_key in range(start, end, N):
        n = first_key + tl.arange(0, N)[None, :]  # [1, N]
        # [N, W]
        k = load_block(problem, problem.key, sequence, first_key, problem.src_len, FULL, N, W)
        parts = compute_parts(
            problem, q, k, head, first_query, first_key, FLIP, PRODUCT, SHARED_TABLE, N, W
        )
        scores = combine_parts(problem, parts, head, first_query, first_key, FLIP, PRODUCT, N)
        # Masks come last: they are applied to the whole score, and never multiplied.
        scores = apply_mask(problem, scores, batch, m, n, DIRECTION, FULL)
        weights, rescale, highest, total = online_softmax_step(scores, highest, total)
        if problem.dropout is not None:  # only now, since dropped weights count in the softmax
            weights = tl.where(is_kept(problem, sequence, m, n, FULL), weights, 0.0)
        # [N, W], loaded late to save registers.
        v = load_block(problem, problem.value, sequence, first_key, problem.src_len, FULL, N, W)
        sums = add_values(
            problem, sums * rescale[:, None], weights, v, head, first_query, first_key, N, W
        )
    store_sums(problem, attended, log_sums, sums, total, highest, sequence, first_query, N, W)
