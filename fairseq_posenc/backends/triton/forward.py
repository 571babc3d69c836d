# mypy: disable-error-code="no-untyped-def"
"""The forward pass: one program for each block of queries, over all keys that it sees.

Source: the online softmax of FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.bands import (
    load_band,
    load_rows,
    multiply_exactly,
    store_rows,
    unskew,
)
from fairseq_posenc.backends.triton.first_token import split_reset, store_pairs
from fairseq_posenc.backends.triton.tiles import (
    kept,
    key_range,
    load_keys,
    parts_of,
    place,
    score,
    visible,
)


@triton.jit
def weigh(scores, highest, total):
    """Return weights, what the sums so far shrink by, and the highest score and total so far."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    return weights, decay, higher, total * decay + tl.sum(weights, 1)


@triton.jit
def values_by_distance(problem, weights, head, m0, n0, N: tl.constexpr, W: tl.constexpr):
    """Return the sums of the value table's rows for a tile, ``(N, W)``."""
    left, right = unskew(weights, N, 1)
    left_rows, right_rows = load_band(problem, problem.value_table, head, m0, n0, N, W)
    return multiply_exactly(left, left_rows) + multiply_exactly(right, right_rows)


@triton.jit
def forward_kernel(
    problem,
    attended,
    log_sums,
    value_sums,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write attended values ``(B, H, T, D)``, log2 of the sums of exponentials ``(B, H, T)``.

    And, with a reset, the weights on the two rows of the value table, ``(B, H, T, 2)``. Values are
    hardly rounded: the backward pass subtracts them from numbers that can be nearly as large.
    """
    sequence, m0 = place(problem.tgt_len, N)
    batch, head = sequence // problem.heads, sequence % problem.heads
    width = problem.width
    queries = sequence.to(tl.int64) * problem.tgt_len
    q = load_rows(problem.query + queries * width, m0, problem.tgt_len, width, N, W)
    sums = tl.zeros((N, W), tl.float32)
    total = tl.zeros((N,), tl.float32)
    first = tl.zeros((N,), tl.float32)
    second = tl.zeros((N,), tl.float32)
    highest = tl.full((N,), float("-inf"), tl.float32)
    start, end = key_range(problem, m0, DIRECTION, N)
    for n0 in range(start, end, N):
        k, v = load_keys(problem, sequence, n0, N, W)
        parts = parts_of(problem, q, k, sequence, m0, n0, PRODUCT, N, W)
        scores = score(problem, parts, sequence, m0, n0, PRODUCT, N)
        # Masks come last: they are applied to the whole score, and never multiplied.
        scores = tl.where(visible(problem, batch, m0, n0, DIRECTION, N), scores, float("-inf"))
        weights, decay, highest, total = weigh(scores, highest, total)
        if problem.seed is not None:
            weights *= kept(problem, sequence, m0, n0, N)
        sums = sums * decay[:, None] + multiply_exactly(weights, v)
        if problem.value_table is not None:
            weights, first, second = split_reset(
                problem, weights, first * decay, second * decay, batch, m0, n0, 1, N
            )
            sums += values_by_distance(problem, weights, head, m0, n0, N, W)
    blind = total == 0.0
    share = tl.where(blind, 0.0, 1.0) / tl.where(blind, 1.0, total)
    store_rows(attended + queries * width, sums * share[:, None], m0, problem.tgt_len, width, N, W)
    if value_sums is not None:
        store_pairs(value_sums + queries * 2, first * share, second * share, m0, problem.tgt_len, N)
    # With an infinite sum, the backward pass finds weights of zero for a query that sees no key.
    log_sum = tl.where(blind, float("inf"), highest + tl.log2(tl.where(blind, 1.0, total)))
    m = m0 + tl.arange(0, N)
    tl.store(log_sums + queries + m, log_sum, mask=m < problem.tgt_len)
