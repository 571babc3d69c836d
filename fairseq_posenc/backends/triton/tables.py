# mypy: disable-error-code="no-untyped-def"
"""The backward pass for tables. All tiles on one diagonal of blocks share the same band of rows.

So a program takes one diagonal, one head and a chunk of the batch, and adds up the gradients of the
band. The sums over chunks, and of bands that overlap, follow outside in a fixed order: nothing is
added atomically, and the gradients are the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.bands import multiply, store_rows, unskew
from fairseq_posenc.backends.triton.first_token import split_reset
from fairseq_posenc.backends.triton.gradients import gradients, load_queries
from fairseq_posenc.backends.triton.tiles import load_keys


@triton.jit
def block_range(problem, diagonal, DIRECTION: tl.constexpr, N: tl.constexpr):
    """Return from which to which block of queries a diagonal runs; none if nothing is seen."""
    start = tl.maximum(0, -diagonal)
    end = tl.minimum(tl.cdiv(problem.tgt_len, N), tl.cdiv(problem.src_len, N) - diagonal)
    past = problem.src_len - problem.tgt_len
    if DIRECTION == "lr":
        end = tl.where(diagonal * N < N + past, end, 0)
    if DIRECTION == "rl":
        end = tl.where(diagonal * N + N > past, end, 0)
    return start, end


@triton.jit
def add_vectors(sums, tile, x, N: tl.constexpr, BAND_AXIS: tl.constexpr):
    """Return the two halves of a band's gradient after one more tile, both ``(N, W)``."""
    left, right = unskew(tile, N, BAND_AXIS)
    if BAND_AXIS == 1:
        left, right = tl.trans(left), tl.trans(right)
    return (
        sums[0] + multiply(left.to(x.dtype), x),
        sums[1] + multiply(right.to(x.dtype), x),
    )


@triton.jit
def store_vectors(band, sums, program, width, N: tl.constexpr, W: tl.constexpr):
    """Store the two halves of the band of a program."""
    rows = band + program.to(tl.int64) * 2 * N * width
    store_rows(rows, sums[0], 0, 2 * N, width, N, W)
    store_rows(rows, sums[1], N, 2 * N, width, N, W)


@triton.jit
def store_scalars(band, tile, first, second, program, N: tl.constexpr):
    """Store a band's gradient of scalars, of which the tiles were added up, and the reset's."""
    left, right = unskew(tile, N, 1)
    rows = band + program.to(tl.int64) * 4 * N + tl.arange(0, N)
    tl.store(rows, tl.sum(left, 0))
    tl.store(rows + N, tl.sum(right, 0))
    tl.store(rows + 2 * N, first)
    tl.store(rows + 3 * N, second)


@triton.jit
def store_bands(
    problem, bands, by_query, by_key, by_value, scalars, program, N: tl.constexpr, W: tl.constexpr
):
    """Store what is wanted of a program's gradients."""
    if bands.query_table is not None:
        store_vectors(bands.query_table, by_query, program, problem.width, N, W)
    if bands.key_table is not None:
        store_vectors(bands.key_table, by_key, program, problem.width, N, W)
    if bands.value_table is not None:
        store_vectors(bands.value_table, by_value, program, problem.width, N, W)
    if bands.gain is not None:
        store_scalars(bands.gain, scalars[0], scalars[1], scalars[2], program, N)
    if bands.bias is not None:
        store_scalars(bands.bias, scalars[3], scalars[4], scalars[5], program, N)


@triton.jit(do_not_specialize=["batches", "chunks", "diagonals"])
def tables_kernel(
    problem,
    saved,
    bands,
    batches,
    chunks,
    diagonals,
    DIRECTION: tl.constexpr,
    PRODUCT: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write :class:`~fairseq_posenc.backends.triton.problem.Bands`."""
    program = tl.program_id(0)
    diagonal = program % diagonals - (tl.cdiv(problem.tgt_len, N) - 1)
    chunk = program // diagonals % chunks
    head = program // diagonals // chunks
    nothing = tl.zeros((N, W), tl.float32)
    by_query, by_key, by_value = (nothing, nothing), (nothing, nothing), (nothing, nothing)
    by_gain = tl.zeros((N, N), tl.float32)
    by_bias = tl.zeros((N, N), tl.float32)
    none = tl.zeros((N,), tl.float32)
    gain_first, gain_second, bias_first, bias_second = none, none, none, none
    start, end = block_range(problem, diagonal, DIRECTION, N)
    size = tl.cdiv(batches, chunks)
    for batch in range(chunk * size, tl.minimum(batches, (chunk + 1) * size)):
        for block in range(start, end):
            sequence = batch * problem.heads + head
            m0 = block * N
            n0 = m0 + diagonal * N
            q, grad = load_queries(problem, saved, sequence, m0, N, W)
            k, v = load_keys(problem, sequence, n0, N, W)
            weights, by_score, parts = gradients(
                problem, saved, q, grad, k, v, sequence, m0, n0, DIRECTION, PRODUCT, N, W
            )
            if bands.query_table is not None:
                tile, _, _ = split_reset(problem, parts[2], none, none, batch, m0, n0, 0, N)
                by_query = add_vectors(by_query, tile, q, N, 1)
            if bands.key_table is not None:
                tile, _, _ = split_reset(problem, parts[3], none, none, batch, m0, n0, 0, N)
                by_key = add_vectors(by_key, tile, k, N, 0)
            if bands.value_table is not None:
                tile, _, _ = split_reset(problem, weights, none, none, batch, m0, n0, 0, N)
                by_value = add_vectors(by_value, tile, grad, N, 1)
            if bands.gain is not None:
                tile, gain_first, gain_second = split_reset(
                    problem, parts[1], gain_first, gain_second, batch, m0, n0, 0, N
                )
                by_gain += tile
            if bands.bias is not None:
                tile, bias_first, bias_second = split_reset(
                    problem, by_score, bias_first, bias_second, batch, m0, n0, 0, N
                )
                by_bias += tile
    scalars = (by_gain, gain_first, gain_second, by_bias, bias_first, bias_second)
    store_bands(problem, bands, by_query, by_key, by_value, scalars, program, N, W)
