# mypy: disable-error-code="no-untyped-def"
"""The backward pass for queries, a program for each block of them, and for keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.bands import load_band, multiply, store_rows, unskew
from fairseq_posenc.backends.triton.first_token import split_reset, store_pairs
from fairseq_posenc.backends.triton.gradients import gradients, load_queries
from fairseq_posenc.backends.triton.tiles import key_range, load_keys, place, query_range


@triton.jit
def query_kernel(
    problem,
    saved,
    grad_query,
    grad_reset,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write the gradients of the queries, ``(B, H, T, D)``, and of ``query_reset``."""
    sequence, m0 = place(problem.tgt_len, N)
    batch, head = sequence // problem.heads, sequence % problem.heads
    q, grad = load_queries(problem, saved, sequence, m0, N, W)
    by_q = tl.zeros((N, W), tl.float32)
    first = tl.zeros((N,), tl.float32)
    second = tl.zeros((N,), tl.float32)
    start, end = key_range(problem, m0, DIRECTION, N)
    for n0 in range(start, end, N):
        k, v = load_keys(problem, sequence, n0, N, W)
        _, _, parts = gradients(
            problem, saved, q, grad, k, v, sequence, m0, n0, DIRECTION, PRODUCT, N, W
        )
        by_q += multiply(parts[0].to(k.dtype), k)
        if problem.query_table is not None:
            tile, first, second = split_reset(problem, parts[2], first, second, batch, m0, n0, 1, N)
            left, right = unskew(tile, N, 1)
            left_rows, right_rows = load_band(problem, problem.query_table, head, m0, n0, N, W)
            by_q += multiply(left.to(k.dtype), left_rows)
            by_q += multiply(right.to(k.dtype), right_rows)
    queries = sequence.to(tl.int64) * problem.tgt_len
    store_rows(grad_query + queries * problem.width, by_q, m0, problem.tgt_len, problem.width, N, W)
    if grad_reset is not None:
        store_pairs(grad_reset + queries * 2, first, second, m0, problem.tgt_len, N)


@triton.jit
def key_kernel(
    problem,
    saved,
    grad_key,
    grad_value,
    grad_reset,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write the gradients of keys and values, ``(B, H, S, D)``, and of ``key_reset``."""
    sequence, n0 = place(problem.src_len, N)
    batch, head = sequence // problem.heads, sequence % problem.heads
    k, v = load_keys(problem, sequence, n0, N, W)
    by_k = tl.zeros((N, W), tl.float32)
    by_v = tl.zeros((N, W), tl.float32)
    first = tl.zeros((N,), tl.float32)
    second = tl.zeros((N,), tl.float32)
    start, end = query_range(problem, n0, DIRECTION, N)
    for m0 in range(start, end, N):
        q, grad = load_queries(problem, saved, sequence, m0, N, W)
        weights, _, parts = gradients(
            problem, saved, q, grad, k, v, sequence, m0, n0, DIRECTION, PRODUCT, N, W
        )
        by_v += multiply(tl.trans(weights.to(v.dtype)), grad)
        by_k += multiply(tl.trans(parts[0].to(q.dtype)), q)
        if problem.key_table is not None:
            tile, first, second = split_reset(problem, parts[3], first, second, batch, m0, n0, 0, N)
            left, right = unskew(tile, N, 0)
            left_rows, right_rows = load_band(problem, problem.key_table, head, m0, n0, N, W)
            by_k += multiply(tl.trans(left.to(q.dtype)), left_rows)
            by_k += multiply(tl.trans(right.to(q.dtype)), right_rows)
    keys = sequence.to(tl.int64) * problem.src_len
    store_rows(grad_key + keys * problem.width, by_k, n0, problem.src_len, problem.width, N, W)
    store_rows(grad_value + keys * problem.width, by_v, n0, problem.src_len, problem.width, N, W)
    if grad_reset is not None:
        store_pairs(grad_reset + keys * 2, first, second, n0, problem.src_len, N)
