"""Attention as one differentiable step: starts the kernels of both passes.

The forward pass is a single launch. In the backward pass, ``backward_kernel`` gives the gradients
of keys and values, and stores gradients of the scores' parts in *tiles* (:class:`Tiles`). Products
of tiles give the gradients of queries, of the key table's term (``tokens_kernel``), and of tables.

Slabs, each of one sequence (a head of a sentence) or more, keep tiles within ``MAX_BYTES``.

B batch, H heads, T queries, S keys, R rows of a table, D head size.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.triton import is_interpreted
from fairseq_posenc.backends.triton.kernels import backward_kernel, forward_kernel
from fairseq_posenc.backends.triton.problem import Problem, Table
from fairseq_posenc.backends.triton.stored import tables_kernel, tokens_kernel

PROGRAMS = 512  # of `tables_kernel`, to fill a GPU; for that, gradients are summed in copies
MAX_BYTES = 2**31  # of the tiles of a slab
MIN_SIDE = 16  # the smallest side that a matrix in `tl.dot` may have


class Options(NamedTuple):
    """What a kernel is compiled for; every field is a constant in the kernel."""

    M: tl.constexpr  # queries of a tile
    N: tl.constexpr  # keys of a tile
    W: tl.constexpr  # D, padded to a power of 2
    FULL: tl.constexpr  # whether all tiles are full, so that no load needs a mask


class Tile(NamedTuple):
    """The tile of a kernel, and how the kernel is compiled."""

    queries: int
    keys: int
    warps: int  # of 32 threads each
    stages: int = 1  # tiles loaded ahead, into shared memory; tables of vectors leave room for 1


INTERPRETED_TILE = Tile(MIN_SIDE, MIN_SIDE, warps=1)


def choose_tile(problem: Problem, backward: bool) -> Tile:
    """Choose the tile of the forward or the backward kernel, for the GPU in use.

    The sizes were found by compiling, not by timing: matrix units run at full width, and as few
    registers as possible are spilled (``benchmarks/instructions.py``).
    """
    if is_interpreted():
        return INTERPRETED_TILE
    arch = triton.runtime.driver.active.get_current_target().arch  # 90: H100; AMD's are names
    if not isinstance(arch, int) or arch < 90 or problem.query.dtype == torch.float32:
        return Tile(32, 32, warps=4)
    is_wide = problem.width > 64  # wider heads take smaller tiles
    if not backward:
        has_vectors = problem.query_table or problem.key_table
        return Tile(64, 64, 4) if has_vectors or is_wide else Tile(128, 64, 8, stages=2)
    if problem.PRODUCT or is_wide:
        return Tile(32, 64, 4)
    return Tile(64, 64, 4) if problem.key_table else Tile(64, 128, 8)


def build_options(problem: Problem, tile: Tile) -> Options:
    """Build the compile-time options of a kernel."""
    width = max(MIN_SIDE, triton.next_power_of_2(problem.width))
    is_full = not (problem.tgt_len % tile.queries or problem.src_len % tile.keys)
    values = tile.queries, tile.keys, width, is_full and problem.width == width
    return Options(*(tl.constexpr(value) for value in values))


class Slab(NamedTuple):
    """The pairs whose tiles the backward pass stores together."""

    sequence: int  # the first sequence
    sequences: int  # number of sequences
    queries: int  # rows of a sequence's tiles, T or more
    keys: int  # columns of them, S or more


class Tiles(NamedTuple):
    """Gradients of the parts of the scores for the pairs of a slab; None for one not needed.

    All are flat: ``(sequences, queries, keys)``. They lack a factor, which is :attr:`Side.factor`.
    """

    content: Tensor  # the gradients of q_i.k_j
    query_term: Tensor | None = None  # None also if it equals the content's
    key_term: Tensor | None = None  # `(sequences, keys, queries)`
    gain: Tensor | None = None  # of the factor by distance
    bias: Tensor | None = None  # of the summand by distance; None also if it equals the content's


class Side(NamedTuple):
    """A table, what it is multiplied by, and the gradients of both."""

    table: Table | None
    table_grad: Tensor | None  # `(copies x H, R, D or nothing)` to add up; None: not trained
    tokens: Tensor | None  # queries or keys; None for a table of numbers
    token_grad: Tensor | None  # shaped as the tokens
    tiles: Tensor | None  # gradients of the table's term
    ends: Tensor | None  # of clipped tables: `tokens_kernel` writes them, `tables_kernel` reads
    factor: float  # times sums of tiles: 1 / (1 - dropout rate), and the scale, but not of a bias
    SIGN: tl.constexpr  # 1 if the rows of tiles are queries, -1 if they are keys


class Attention(torch.autograd.Function):
    """Flash attention with tables by distance; gradients are of ``Problem.tensors``."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor | None) -> Tensor:
        """Compute the attended values ``(B, H, T, D)``.

        Both results of the kernel are float32: the backward pass subtracts nearly equal numbers.
        """
        attended = torch.empty_like(problem.query, dtype=torch.float32)
        shifts = attended.new_empty(problem.query.shape[:3])  # -log2 of sums of exponentials
        tile = choose_tile(problem, backward=False)
        programs = len(problem.query) * problem.heads * triton.cdiv(problem.tgt_len, tile.queries)
        launch(forward_kernel, programs, problem, tile, attended, shifts)
        ctx.problem = problem.with_tensors([None] * len(tensors))  # autograd keeps them, below
        ctx.save_for_backward(attended, shifts, *tensors)
        return attended.type_as(problem.query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of all tensors."""
        refuse_second_order("triton")
        attended, shifts, *tensors = ctx.saved_tensors
        problem: Problem = ctx.problem.with_tensors(tensors)
        # Delta is subtracted from the gradients of the weights. Both come from the same rounded
        # gradient, so that they cancel out if a query sees a single key.
        grad = grad.type_as(problem.query).contiguous()
        delta = (grad * attended).sum(-1) / problem.kept_factor  # weights lack 1 / (1 - rate)
        statistics = torch.stack((shifts, delta), -1).view(torch.int64)  # both in one load
        tile = choose_tile(problem, backward=True)
        block = min(tile.queries, tile.keys)  # divides both: they are powers of 2
        square = tile._replace(queries=block, keys=block)  # in which `stored` reads the tiles

        has_key_term = problem.key_table is not None  # which `tokens_kernel` adds in float32
        grad_query, grad_value = torch.empty_like(problem.query), torch.empty_like(problem.value)
        grad_key = torch.empty_like(problem.key, dtype=torch.float32 if has_key_term else None)
        needed = [*ctx.needs_input_grad[4:]]  # of the tables: after problem, query, key, value
        trained = [table if x else None for table, x in zip(problem.tables, needed)]
        batch, heads = problem.query.shape[:2]
        table_blocks = sum(triton.cdiv(x.rows.size(1), block) for x in trained if x is not None)
        copies = min(batch, math.ceil(PROGRAMS / max(1, heads * table_blocks)))
        table_grads = [x and shifts.new_zeros(copies * heads, *x.rows.shape[1:]) for x in trained]
        slabs, tiles = allocate_tiles(problem, tile, needed)
        _, sequences, queries, keys = slabs[0]  # the largest slab: its memory serves all
        query_ends, key_ends = (shifts.new_empty(2 * sequences * n) for n in (queries, keys))
        of_queries, of_keys, of_gain, of_bias = zip(problem.tables, table_grads)  # table, gradient
        query_term = tiles.content if tiles.query_term is None else tiles.query_term
        bias = tiles.content if tiles.bias is None else tiles.bias
        by_query, by_key = tl.constexpr(1), tl.constexpr(-1)
        factor = problem.scale * problem.kept_factor
        sides = [  # tables of numbers need no ends: they have a row for each distance
            Side(*of_queries, problem.query, grad_query, query_term, query_ends, factor, by_query),
            Side(*of_keys, problem.key, grad_key, tiles.key_term, key_ends, factor, by_key),
            Side(*of_gain, None, None, tiles.gain, None, factor, by_query),
            Side(*of_bias, None, None, bias, None, problem.kept_factor, by_query),  # not scaled
        ]
        of_tables = tuple(side for side in sides if side.table_grad is not None)
        token_blocks = triton.cdiv(problem.tgt_len, block)
        token_blocks += triton.cdiv(problem.src_len, block) if has_key_term else 0
        for slab in slabs:
            programs = slab.sequences * (slab.keys // tile.keys)
            arguments = grad, statistics, slab, tiles, grad_key, grad_value
            launch(backward_kernel, programs, problem, tile, *arguments)
            programs = slab.sequences * token_blocks
            launch(tokens_kernel, programs, problem, square, slab, tiles.content, *sides[:2])
            if of_tables:
                programs = copies * heads * table_blocks
                launch(tables_kernel, programs, problem, square, slab, of_tables, copies)
        sums = [  # over copies, each of different sentences, and over heads that share a table
            None if x is None or table is None else x.unflatten(0, (-1, len(table.rows))).sum(0)
            for x, table in zip(table_grads, trained)
        ]
        return None, grad_query, grad_key, grad_value, *sums


def allocate_tiles(problem: Problem, tile: Tile, needed: list[bool]) -> tuple[list[Slab], Tiles]:
    """Divide a problem into slabs, and allocate the tiles of the largest one, which serve all."""
    _, _, needs_gain, needs_bias = needed  # which tables need a gradient
    # In a plain sum, gradients of query term, bias and content are equal; key terms lie by key.
    plain_sum = not problem.PRODUCT and problem.gain is None  # nothing multiplies the content
    is_stored = {"content": True, "key_term": problem.key_table is not None}
    is_stored |= {"gain": needs_gain, "bias": needs_bias and not plain_sum}
    is_stored["query_term"] = problem.query_table is not None and not plain_sum
    stored = [name for name, is_needed in is_stored.items() if is_needed]
    slabs = split_slabs(problem, tile, len(stored))
    _, sequences, queries, keys = slabs[0]
    memory = problem.query.new_empty(len(stored), sequences * queries * keys)
    return slabs, Tiles(**dict(zip(stored, memory)))  # the others are None


def launch(kernel: Any, programs: int, problem: Problem, tile: Tile, *arguments: Any) -> None:
    """Start programs of a kernel on the device of a problem."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    with torch.cuda.device_of(problem.query):
        kernel[(programs,)](problem, build_options(problem, tile), *arguments, **options)


def split_slabs(problem: Problem, tile: Tile, per_pair: int) -> list[Slab]:
    """List a problem's slabs, the largest first; ``per_pair``: numbers stored for each pair."""
    rows = triton.cdiv(problem.tgt_len, tile.queries) * tile.queries
    columns = triton.cdiv(problem.src_len, tile.keys) * tile.keys
    sequences = problem.query.size(0) * problem.heads
    most = max(1, MAX_BYTES // (per_pair * rows * columns * problem.query.element_size()))
    step = math.ceil(sequences / math.ceil(sequences / most))  # equal slabs
    starts = range(0, sequences, step)
    return [Slab(start, min(step, sequences - start), rows, columns) for start in starts]
