"""Divides the backward pass into slabs, which bounds the memory of stored tiles.

A slab takes some sequences (heads of a sentence) with all of their keys or, if one sequence is too
large, some keys of one sequence. The division depends on shapes alone, so sums have a fixed order.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.problem import (
    Layout,
    Problem,
    Side,
    Slab,
    Tiles,
    TrainedTables,
)

# Values stored at a time: 64 MiB in half precision, little more than the L2 cache of an H200.
MAX_VALUES = 2**25


def choose_stored(problem: Problem, product: bool, trained: TrainedTables) -> set[str]:
    """Choose the tiles that are stored, as names of fields of :class:`Tiles`.

    If the score is a plain sum (no product, no gain), the gradients of its query term and its bias
    equal the gradient of the score, which is stored anyway.
    """
    plain_sum = not product and problem.gain is None
    is_stored = {
        "content": True,
        "query": problem.query_table is not None and not plain_sum,
        "gain": trained.gain,
        "bias": trained.bias and not plain_sum,
        "weights": trained.value_table or needs_value_tiles(problem, product),
        "key": problem.key_table is not None,
    }
    return {name for name, needed in is_stored.items() if needed}


def needs_value_tiles(problem: Problem, product: bool) -> bool:
    """Check whether the gradient of values is computed from stored weights."""
    both = problem.query_table is not None and problem.key_table is not None
    return product or both


def split_slabs(problem: Problem, block: int, stored: set[str]) -> Iterator[Slab]:
    """Yield the slabs of a problem.

    Args:
        problem: shapes of the attention.
        block: rows and columns of a block; sizes are rounded up to it.
        stored: the tiles that take memory (:func:`choose_stored`); those of the key term have a row
            for each key, all others one for each query.
    """
    queries = -(-problem.tgt_len // block) * block
    keys = -(-problem.src_len // block) * block
    sequences = problem.query.size(0) * problem.heads
    by_query = len(stored - {"key"}) * queries  # rows of all tiles with a row for each query
    key_row = queries + 2 * block if "key" in stored else 0  # values of a row for a key

    def count_values(keys: int) -> int:  # of one sequence
        return by_query * (keys + 2 * block) + key_row * keys

    if count_values(keys) <= MAX_VALUES:
        step, slab_keys = MAX_VALUES // count_values(keys), keys
    else:
        step = 1
        most = (MAX_VALUES - count_values(0)) // (by_query + key_row)
        slab_keys = max(1, most // block) * block
    for start in range(0, problem.src_len, slab_keys):
        end = min(start + slab_keys, problem.src_len)
        rows = -(-(end - start) // block) * block
        layout = Layout(start, end, queries, rows, rows + 2 * block, queries + 2 * block)
        for sequence in range(0, sequences, step):
            yield Slab(sequence, min(step, sequences - sequence), layout)


def make_zero_tiles(problem: Problem, slab: Slab, stored: set[str]) -> Tiles:
    """Allocate the tiles of a slab, as zeros, which are right wherever kernels write nothing."""
    layout = slab.layout
    tiles: dict[str, Any] = dict.fromkeys(Tiles._fields)
    for name in stored:
        shape = slab.sequences, layout.queries, layout.query_stride
        if name == "key":
            shape = slab.sequences, layout.keys, layout.key_stride
        tiles[name] = problem.query.new_zeros(shape)
    return Tiles(**tiles)


def describe_query_side(problem: Problem, layout: Layout) -> Side:
    """Describe the layout of tiles with a row for each query."""
    return Side(
        heads=problem.heads,
        width=problem.width,
        rows=layout.queries,
        columns=layout.keys,
        stride=layout.query_stride,
        content_rows=layout.queries,
        content_stride=layout.query_stride,
        row_tokens=problem.tgt_len,
        row_start=0,
        row_end=problem.tgt_len,
        column_tokens=problem.src_len,
        column_start=layout.start,
        row_of_distance_zero=problem.tgt_len - 1,
        table_rows=problem.tgt_len + problem.src_len - 1,
    )


def describe_key_side(problem: Problem, layout: Layout) -> Side:
    """Describe the layout of tiles with a row for each key."""
    return describe_query_side(problem, layout)._replace(
        rows=layout.keys,
        columns=layout.queries,
        stride=layout.key_stride,
        row_tokens=problem.src_len,
        row_start=layout.start,
        row_end=layout.end,
        column_tokens=problem.tgt_len,
        column_start=0,
    )


def add_diagonals(total: Tensor, diagonals: Tensor, sequence: int, side: Side, sign: int) -> None:
    """Add a slab's gradient by diagonal to the gradient of a table by head.

    Args:
        total: ``(H, R[, D])`` of float32.
        diagonals: ``(heads, chunks, diagonals, N[, D])`` of float32.
        sequence: index of the slab's first (sentence, head) pair.
        side: layout of the tiles that were summed over.
        sign: 1 if distances grow along a row of tiles, else -1.
    """
    rows = diagonals.sum(1).flatten(1, 2)  # [heads, diagonals * N, ...]
    low = side.row_of_distance_zero + side.column_start - side.row_start - side.rows
    if sign < 0:
        rows = rows.flip(1)
        low = side.row_of_distance_zero - side.column_start + side.row_start + side.rows
        low += 1 - rows.size(1)
    start, end = max(0, low), min(side.table_rows, low + rows.size(1))
    heads = (sequence + torch.arange(rows.size(0), device=diagonals.device)) % side.heads
    total[heads, start:end] += rows[:, start - low : end - low]
