"""The backward pass, slab after slab: starts the kernels and collects their results.

``backward_kernel`` computes the scores again and stores the gradients of their parts in *tiles*
(:class:`Tiles`), pair by pair. Matrix products of tiles then give the gradients of queries and
tables: three launches for a slab.

Slabs bound the memory of the tiles. A slab is some sequences (each is a head of a sentence) with
all of their keys or, if one sequence is too large, some keys of one sequence. The division depends
on shapes alone, so sums have a fixed order.

H heads, R rows of a table, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fairseq_posenc.backends.triton.backward import backward_kernel
from fairseq_posenc.backends.triton.problem import Inputs, Problem, Table
from fairseq_posenc.backends.triton.sizes import build_options, choose_backward_tile
from fairseq_posenc.backends.triton.stored import rows_kernel, tables_kernel

PROGRAMS = 512  # of `tables_kernel`: enough to fill a GPU, few enough to keep their output small
MAX_BYTES = 2**31  # of the tiles of a slab


class Saved(NamedTuple):
    """Results of the forward pass and the gradient of its output, for the backward kernel."""

    grad: Tensor  # `(B, H, T, D)`, of the attended values
    log_sums: Tensor  # `(B, H, T)` of float32, base-2 logarithms of the sums of exponentials
    # `(B, H, T)` of float32, FlashAttention's delta: for each query, the sum of the gradients of
    # its weights by weight
    delta: Tensor


class TrainedTables(NamedTuple):
    """Which tables need a gradient."""

    query_table: bool
    key_table: bool
    gain: bool
    bias: bool


class TableGradients(NamedTuple):
    """The gradients of tables by chunk of the batch and by head, float32; None if not trained."""

    query_table: Tensor | None  # `(chunks, H, R, D)`
    key_table: Tensor | None  # `(chunks, H, R, D)`
    gain: Tensor | None  # `(chunks, H, R)`
    bias: Tensor | None  # `(chunks, H, R)`


class Slab(NamedTuple):
    """The pairs whose tiles the backward pass stores together."""

    sequence: int  # the first sequence
    sequences: int  # number of sequences
    first_key: int
    queries: int  # rows of a sequence's tiles, T or more
    keys: int  # columns of them, the slab's keys or more


class Tiles(NamedTuple):
    """Gradients of the parts of the scores for the pairs of a slab; None for one not needed.

    All are multiplied by the problem's scale, and of shape ``(sequences, queries, keys)``.
    """

    content: Tensor  # of queries times keys
    query_term: Tensor | None  # None if it equals the content's
    key_term: Tensor | None  # `(sequences, keys, queries)`
    gain: Tensor | None
    bias: Tensor | None  # None if it equals the content's


def compute_gradients(
    problem: Problem, saved: Saved, product: bool, trained: TrainedTables
) -> Inputs:
    """Compute the gradients of a problem's inputs; ``product`` is that of ``Settings``."""
    tile = choose_backward_tile(problem, product)
    options = build_options(problem, product, tile)
    # Its sides divide those of the backward kernel, which writes whole tiles.
    block = min(tile.queries, tile.keys)
    square = tile._replace(queries=block, keys=block)
    rows_options = build_options(problem, product, square)
    stored = choose_stored(problem, product, trained)
    slabs = list(split_slabs(problem, tile.queries, tile.keys, len(stored)))
    has_parts = len(slabs) > 1 and slabs[1].first_key > 0  # so sums over keys are added up
    grad_query = torch.empty_like(problem.query, dtype=torch.float32 if has_parts else None)
    # The backward kernel writes them, and `rows_kernel` adds the key table's term.
    is_added = problem.key_table is not None
    grad_key = torch.empty_like(problem.key, dtype=torch.float32 if is_added else None)
    grad_value = torch.empty_like(problem.value)
    grads, chunks = _allocate_table_gradients(problem, block, trained)
    programs = sum(
        chunks * problem.heads * triton.cdiv(x.size(2), block) for x in grads if x is not None
    )
    tiles = _allocate_tiles(problem, slabs[0], stored)  # the largest slab
    query_ends, key_ends = _allocate_ends(problem, slabs[0])
    for index, slab in enumerate(slabs):
        backward_kernel[(slab.sequences * (slab.keys // tile.keys),)](
            problem, options, saved, slab, tiles, grad_key, grad_value, **tile.launch_options()
        )
        arguments = problem, rows_options, slab, tiles, query_ends, key_ends
        keys = min(slab.keys, problem.src_len - slab.first_key) if is_added else 0
        blocks = triton.cdiv(problem.tgt_len, block) + triton.cdiv(keys, block)
        rows_kernel[(slab.sequences * blocks,)](
            *arguments, grad_query, grad_key, ADD=slab.first_key > 0, **square.launch_options()
        )
        if programs:
            tables_kernel[(programs,)](
                *arguments, grads, chunks, ADD=index > 0, **square.launch_options()
            )
    # Stored gradients are multiplied by the scale, but a bias is added after scaling.
    bias = _sum_groups(grads.bias, problem.bias)
    return Inputs(
        grad_query,
        grad_key,
        grad_value,
        _sum_groups(grads.query_table, problem.query_table),
        _sum_groups(grads.key_table, problem.key_table),
        _sum_groups(grads.gain, problem.gain),
        None if bias is None else bias / problem.scale,
    )


def choose_stored(problem: Problem, product: bool, trained: TrainedTables) -> tuple[str, ...]:
    """Choose the tiles that are stored, as names of fields of :class:`Tiles`.

    If the score is a plain sum (no product, no gain), the gradients of its query term and its bias
    equal the gradient of the score, which is stored anyway.
    """
    plain_sum = not product and problem.gain is None
    is_stored = {
        "content": True,
        "query_term": problem.query_table is not None and not plain_sum,
        "key_term": problem.key_table is not None,
        "gain": trained.gain,
        "bias": trained.bias and not plain_sum,
    }
    return tuple(name for name, needed in is_stored.items() if needed)


def split_slabs(problem: Problem, queries: int, keys: int, kinds: int) -> Iterator[Slab]:
    """Yield the slabs of a problem, the largest first.

    Args:
        problem: shapes of the attention.
        queries: queries of a tile.
        keys: keys of a tile.
        kinds: number of tiles that are stored for a pair.
    """
    rows = math.ceil(problem.tgt_len / queries) * queries
    columns = math.ceil(problem.src_len / keys) * keys
    sequences = problem.query.size(0) * problem.heads
    column_bytes = kinds * rows * problem.query.element_size()
    step = min(MAX_BYTES // (column_bytes * columns), sequences)
    slab_keys = columns
    if step == 0:
        step = 1
        slab_keys = max(1, MAX_BYTES // column_bytes // keys) * keys
    step = math.ceil(sequences / math.ceil(sequences / step))  # equal slabs
    for sequence in range(0, sequences, step):
        for first_key in range(0, problem.src_len, slab_keys):
            slab_columns = min(slab_keys, columns - first_key)
            yield Slab(sequence, min(step, sequences - sequence), first_key, rows, slab_columns)


def _allocate_tiles(problem: Problem, slab: Slab, stored: tuple[str, ...]) -> Tiles:
    size = len(stored), slab.sequences * slab.queries * slab.keys
    tiles = dict(zip(stored, problem.query.new_empty(size).unbind()))
    return Tiles(*(tiles.get(name) for name in Tiles._fields))  # type: ignore[arg-type]


def _allocate_ends(problem: Problem, slab: Slab) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the ends of queries and of keys; see ``stored.py``."""
    if not problem.is_clipped:
        return None, None
    tokens = slab.queries + slab.keys
    ends = problem.query.new_empty(slab.sequences * tokens * 2, dtype=torch.float32)
    return tuple(ends.split([slab.sequences * n * 2 for n in (slab.queries, slab.keys)]))


def _allocate_table_gradients(
    problem: Problem, block: int, trained: TrainedTables
) -> tuple[TableGradients, int]:
    """Allocate the gradients of tables, and choose the number of chunks of the batch."""
    tables = [
        table if needed else None
        for needed, table in zip(
            trained, (problem.query_table, problem.key_table, problem.gain, problem.bias)
        )
    ]
    blocks = sum(triton.cdiv(table.last + 1, block) for table in tables if table is not None)
    chunks = min(problem.query.size(0), math.ceil(PROGRAMS / max(1, problem.heads * blocks)))

    def allocate(table: Table | None) -> Tensor | None:
        if table is None:
            return None
        shape = chunks, problem.heads, *table.rows.shape[1:]
        return table.rows.new_empty(shape, dtype=torch.float32)

    return TableGradients(*map(allocate, tables)), chunks


def _sum_groups(grads: Tensor | None, table: Table | None) -> Tensor | None:
    """Sum the gradients of a table over chunks, and over heads that share it."""
    if grads is None or table is None:
        return None
    return grads.sum(0) if table.head_stride or len(table.rows) > 1 else grads.sum((0, 1))[None]
