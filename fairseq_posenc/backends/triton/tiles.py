# mypy: disable-error-code="no-untyped-def"
"""One tile of N queries by N keys: scores, who sees whom, dropout, and gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.bands import key_products, load_rows, multiply, query_products
from fairseq_posenc.backends.triton.first_token import by_distance, reset_by_key, reset_by_query

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(length, N: tl.constexpr):
    """Return which sequence (of a batch and head) a program takes, and from where on."""
    blocks = tl.cdiv(length, N)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * N


@triton.jit
def load_keys(problem, sequence, n0, N: tl.constexpr, W: tl.constexpr):
    """Return keys and values, both ``(N, W)``."""
    start = sequence.to(tl.int64) * problem.src_len * problem.width
    k = load_rows(problem.key + start, n0, problem.src_len, problem.width, N, W)
    return k, load_rows(problem.value + start, n0, problem.src_len, problem.width, N, W)


@triton.jit
def key_range(problem, m0, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Return from where to where queries from ``m0`` on see any key."""
    past = problem.src_len - problem.tgt_len
    start = 0
    end = problem.src_len
    if DIRECTION == "lr":
        end = tl.minimum(end, m0 + N + past)
    if DIRECTION == "rl":
        start = (m0 + past) // N * N
    return start, end


@triton.jit
def query_range(problem, n0, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Return from where to where queries see any of the keys from ``n0`` on."""
    past = problem.src_len - problem.tgt_len
    start = 0
    end = problem.tgt_len
    if DIRECTION == "lr":
        start = tl.maximum(n0 - past, 0) // N * N
    if DIRECTION == "rl":
        end = tl.minimum(end, n0 + N - past)
    return start, end


@triton.jit
def visible(problem, batch, m0, n0, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Return which queries see which keys, ``(N, N)``."""
    m = m0 + tl.arange(0, N)[:, None]
    n = n0 + tl.arange(0, N)[None, :]
    seen = (m < problem.tgt_len) & (n < problem.src_len)
    past = problem.src_len - problem.tgt_len
    if DIRECTION == "lr":
        seen &= n <= m + past
    if DIRECTION == "rl":
        seen &= n >= m + past
    if problem.padding is not None:
        padding = problem.padding + batch * problem.src_len + n
        seen &= tl.load(padding, mask=n < problem.src_len, other=1) == 0
    if problem.pairs is not None:
        pairs = problem.pairs + m.to(tl.int64) * problem.src_len + n
        seen &= tl.load(pairs, mask=seen, other=1) == 0
    return seen


@triton.jit
def kept(problem, sequence, m0, n0, N: tl.constexpr):
    """Return the factors of dropout, ``(N, N)``: the same whenever and in whichever tile order.

    Source: the counter-based generator Philox of Salmon et al. (2011). The counters are sequence,
    query and key, so that nothing is stored for the backward pass.
    """
    zero = tl.zeros((N, N // 4), tl.int32)
    m = zero + (m0 + tl.arange(0, N))[:, None]
    n = zero + (n0 // 4 + tl.arange(0, N // 4))[None, :]
    a, b, c, d = tl.philox(problem.seed, m, n, zero + sequence, zero)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(N, N)
    drawn = (bits >> 8).to(tl.float32) * (1.0 / (1 << 24))
    return tl.where(drawn >= problem.dropout, 1.0 / (1.0 - problem.dropout), 0.0)


@triton.jit
def parts_of(
    problem, q, k, sequence, m0, n0, PRODUCT: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Return content, gain, query and key term of the scores; absent ones change nothing."""
    batch = sequence // problem.heads
    head = sequence % problem.heads
    content = multiply(q, tl.trans(k))
    gain = 1.0
    by_query = 1.0 if PRODUCT else 0.0
    by_key = 1.0 if PRODUCT else 0.0
    if problem.gain is not None:
        gain = by_distance(problem, problem.gain, batch, head, m0, n0, N)
    if problem.query_table is not None:
        by_query = query_products(problem, q, problem.query_table, head, m0, n0, N, W)
        by_query = reset_by_query(problem, by_query, problem.query_reset, sequence, m0, n0, N)
    if problem.key_table is not None:
        by_key = key_products(problem, k, problem.key_table, head, m0, n0, N, W)
        by_key = reset_by_key(problem, by_key, problem.key_reset, sequence, m0, n0, N)
    return content, gain, by_query, by_key


@triton.jit
def score(problem, parts, sequence, m0, n0, PRODUCT: tl.constexpr, N: tl.constexpr):
    """Return the scores of a tile, times log2(e), so that their exponentials are powers of 2."""
    content, gain, by_query, by_key = parts
    content *= gain
    combined = content * by_query * by_key if PRODUCT else content + by_query + by_key
    combined *= problem.scale * LOG2_E
    if problem.bias is not None:
        batch = sequence // problem.heads
        head = sequence % problem.heads
        combined += by_distance(problem, problem.bias, batch, head, m0, n0, N) * LOG2_E
    return combined
