# mypy: disable-error-code="no-untyped-def"
"""One tile of the backward pass: weights made again, and the gradients of all parts of a score."""

from __future__ import annotations

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.bands import load_rows, multiply, query_products
from fairseq_posenc.backends.triton.first_token import reset_by_query
from fairseq_posenc.backends.triton.tiles import kept, parts_of, score, visible


@triton.jit
def load_queries(problem, saved, sequence, m0, N: tl.constexpr, W: tl.constexpr):
    """Return queries and their gradient of the output, both ``(N, W)``."""
    start = sequence.to(tl.int64) * problem.tgt_len * problem.width
    q = load_rows(problem.query + start, m0, problem.tgt_len, problem.width, N, W)
    return q, load_rows(saved.grad + start, m0, problem.tgt_len, problem.width, N, W)


@triton.jit
def gradients(
    problem,
    saved,
    q,
    grad,
    k,
    v,
    sequence,
    m0,
    n0,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Return the weights after dropout, the gradient of the score, and those of its parts."""
    queries = sequence.to(tl.int64) * problem.tgt_len
    m = m0 + tl.arange(0, N)
    log_sum = tl.load(saved.log_sums + queries + m, mask=m < problem.tgt_len, other=float("inf"))
    dot = tl.load(saved.dots + queries + m, mask=m < problem.tgt_len, other=0.0)
    parts = parts_of(problem, q, k, sequence, m0, n0, PRODUCT, N, W)
    scores = score(problem, parts, sequence, m0, n0, PRODUCT, N)
    seen = visible(problem, sequence // problem.heads, m0, n0, DIRECTION, N)
    weights = tl.exp2(tl.where(seen, scores - log_sum[:, None], float("-inf")))
    by_weight = multiply(grad, tl.trans(v))
    if problem.value_table is not None:
        head = sequence % problem.heads
        rows = query_products(problem, grad, problem.value_table, head, m0, n0, N, W)
        by_weight += reset_by_query(problem, rows, saved.value_reset, sequence, m0, n0, N)
    dropped = weights
    if problem.seed is not None:
        factors = kept(problem, sequence, m0, n0, N)
        dropped = weights * factors
        by_weight *= factors
    by_score = weights * (by_weight - dot[:, None])
    return dropped, by_score, by_parts(parts, by_score * problem.scale, PRODUCT)


@triton.jit
def by_parts(parts, grad, PRODUCT: tl.constexpr):
    """Return the gradients of content, gain, query and key term, by the rule of products."""
    content, gain, by_query, by_key = parts
    if PRODUCT:
        tables = grad * by_query * by_key
        gained = grad * content * gain
        result = (tables * gain, tables * content, gained * by_key, gained * by_query)
    else:
        result = (grad * gain, grad * content, grad, grad)
    return result
