"""The backward pass, slab after slab: starts the kernels and collects their results.

``backward_kernel`` computes the scores again and stores the gradients of their parts in *tiles*
(:class:`~fairseq_posenc.backends.triton.problem.Tiles`), pair by pair. Matrix products of tiles
then give the gradients of queries and tables.

Slabs bound the memory of the tiles. A slab is some sequences (each is a head of a sentence) with
all of their keys or, if one sequence is too large, some keys of one sequence. It starts several
kernels, so it has to fill the GPU. The division depends on shapes alone, so sums have a fixed
order.

H heads, R distances, D head size, N side of a tile.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.backward import backward_kernel
from fairseq_posenc.backends.triton.problem import (
    Layout,
    Problem,
    Saved,
    Side,
    Slab,
    Table,
    Tiles,
    TrainedTables,
)
from fairseq_posenc.backends.triton.sizes import choose_options, choose_warps
from fairseq_posenc.backends.triton.stored import rows_kernel, table_kernel

PROGRAMS = 512  # of `table_kernel`: enough to fill a GPU, few enough to keep their output small
# Numbers in the tiles of a slab: about an H200's L2 cache in half precision (64 MiB); more, if its
# kernels would be too few programs for the processors of a GPU (132 of an H100), up to 512 MiB.
FEW_VALUES, MAX_VALUES = 2**25, 2**28
MIN_PROGRAMS = 256


class Gradients:
    """Computes the gradients of a problem's inputs."""

    def __init__(self, problem: Problem, product: bool, trained: TrainedTables) -> None:
        self.problem = problem
        self.stored = choose_stored(problem, product, trained)
        self.options = choose_options(problem)
        # With tables, `backward_kernel` has no registers left for sums of key gradients; with those
        # of queries and keys, none for values either.
        self.keys_from_tiles = problem.has_vectors
        self.values_from_tiles = needs_value_tiles(problem, product)
        self.query_grad = torch.empty_like(problem.query, dtype=torch.float32)
        self.key_grad = torch.empty_like(problem.key)
        self.value_grad = torch.empty_like(problem.value)
        # By table, `(H, R, D)` or `(H, R)` of float32; None for one not trained.
        self.table_grads = {
            name: self._make_zeros(getattr(problem, name)) if needed else None
            for name, needed in trained._asdict().items()
        }

    def run(self, saved: Saved, options: dict[str, Any]) -> None:
        """Compute all gradients; ``options`` are compile-time options of ``backward_kernel``."""
        tiles = layout = None
        # For a product, which has tables, `backward_kernel` sums neither gradient, but only stores
        # tiles. So no tile goes into another `tl.dot`, and more warps can share them.
        options = {**options, "num_warps": choose_warps(independent=options["PRODUCT"])}
        for slab in split_slabs(self.problem, options["N"], self.stored):
            # Slabs of one layout write the same parts of the tiles; the zeros around them stay.
            if tiles is None or layout != slab.layout:
                tiles = make_zero_tiles(self.problem, slab, self.stored)
                layout = slab.layout
            blocks = slab.sequences * slab.layout.keys // options["N"]
            grads = (
                None if self.keys_from_tiles else self.key_grad,
                None if self.values_from_tiles else self.value_grad,
            )
            backward_kernel[(blocks,)](
                self.problem, saved, slab.sequence, slab.layout, tiles, *grads, **options
            )
            self._write_values(slab, tiles, saved)
            self._write_queries_and_keys(slab, tiles)
            self._add_to_tables(slab, tiles, saved)
        # The stored weights lack the factor of dropout, so the sums are multiplied by it once.
        if (value_table_grad := self.table_grads["value_table"]) is not None:
            value_table_grad.mul_(self.problem.dropout_scale)
        # Stored gradients are multiplied by the scale, but a bias is added after scaling.
        if (bias_grad := self.table_grads["bias"]) is not None:
            bias_grad.div_(self.problem.scale)

    def cast(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Cast the gradients to the shapes and types of the inputs of ``Attention``."""
        grads = [self.query_grad, self.key_grad, self.value_grad, *self.table_grads.values()]
        return [
            None if grad is None or x is None else grad.sum_to_size(x.shape).type_as(x)
            for grad, x in zip(grads, inputs)
        ]

    def _make_zeros(self, table: Table) -> Tensor:
        """Make zeros for the gradient of a table, ``(H, R[, D])`` of float32."""
        rows = self.problem.tgt_len + self.problem.src_len - 1
        size = (self.problem.width,) if table.rows.dim() == 3 else ()
        return torch.zeros(self.problem.heads, rows, *size, device=table.rows.device)

    def _write_queries_and_keys(self, slab: Slab, tiles: Tiles) -> None:
        """Write or add to the gradients of queries; write those of keys if tiles are needed."""
        problem = self.problem
        layout = slab.layout
        query_tiles = tiles.content if tiles.query_term is None else tiles.query_term
        rows_kernel[(slab.sequences * layout.queries // self.options["N"],)](
            slab.sequence,
            describe_query_side(problem, layout),
            content=tiles.content,
            other=problem.key,
            by_distance=query_tiles,
            table=problem.query_table,
            grad=self.query_grad,
            ADD=layout.start > 0,  # to the sums over earlier keys, which an earlier slab wrote
            SIGN=1,
            **self.options,
        )
        if self.keys_from_tiles:
            rows_kernel[(slab.sequences * layout.keys // self.options["N"],)](
                slab.sequence,
                describe_key_side(problem, layout),
                content=tiles.content,
                other=problem.query,
                by_distance=tiles.key_term,
                table=problem.key_table,
                grad=self.key_grad,
                ADD=False,
                SIGN=-1,
                **self.options,
            )

    def _write_values(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Write the gradients of values if stored weights are needed for them."""
        if self.values_from_tiles:
            side = describe_key_side(self.problem, slab.layout)
            rows_kernel[(slab.sequences * slab.layout.keys // self.options["N"],)](
                slab.sequence,
                side._replace(factor=self.problem.dropout_scale),
                content=tiles.weights,
                other=saved.grad,
                by_distance=None,
                table=None,
                grad=self.value_grad,
                ADD=False,
                SIGN=-1,
                **self.options,
            )

    def _add_to_tables(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Add to the gradients of the tables."""
        problem = self.problem
        content = tiles.content
        queries = describe_query_side(problem, slab.layout)
        keys = describe_key_side(problem, slab.layout)
        # For each table, in the order of `TrainedTables`: tiles of its term's gradient, the vectors
        # that its rows were multiplied with (None for numbers), the tiles' layout, and 1 if
        # distances grow along a row, else -1.
        by_table = (
            (content if tiles.query_term is None else tiles.query_term, problem.query, queries, 1),
            (tiles.key_term, problem.key, keys, -1),
            (tiles.weights, saved.grad, queries, 1),
            (tiles.gain, None, queries, 1),
            (content if tiles.bias is None else tiles.bias, None, queries, 1),
        )
        for table_grad, (tile, vectors, side, sign) in zip(self.table_grads.values(), by_table):
            if table_grad is not None:
                by_diagonal = self._sum_diagonals(slab, tile, vectors, side)
                add_diagonals(table_grad, by_diagonal, slab.sequence, side, sign)

    def _sum_diagonals(
        self, slab: Slab, tile: Tensor | None, vectors: Tensor | None, side: Side
    ) -> Tensor:
        """Compute the gradient of a table, ``(heads, chunks, diagonals, N[, D])`` of float32.

        See ``table_kernel``; chunks are parts of the batch.
        """
        assert tile is not None
        block = self.options["N"]
        heads = min(self.problem.heads, slab.sequences)
        diagonals = (slab.layout.queries + slab.layout.keys) // block
        chunks = min(-(-slab.sequences // heads), -(-PROGRAMS // (heads * diagonals)))
        size = (block,) if vectors is None else (block, self.problem.width)
        by_diagonal = tile.new_empty(heads, chunks, diagonals, *size, dtype=torch.float32)
        counts = slab.sequences, heads, chunks
        table_kernel[(heads * chunks * diagonals,)](
            slab.sequence, side, tile, vectors, by_diagonal, *counts, **self.options
        )
        return by_diagonal


def choose_stored(problem: Problem, product: bool, trained: TrainedTables) -> set[str]:
    """Choose the tiles that are stored, as names of fields of :class:`Tiles`.

    If the score is a plain sum (no product, no gain), the gradients of its query term and its bias
    equal the gradient of the score, which is stored anyway.
    """
    plain_sum = not product and problem.gain is None
    is_stored = {
        "content": True,
        "query_term": problem.query_table is not None and not plain_sum,
        "gain": trained.gain,
        "bias": trained.bias and not plain_sum,
        "weights": trained.value_table or needs_value_tiles(problem, product),
        "key_term": problem.key_table is not None,
    }
    return {name for name, needed in is_stored.items() if needed}


def needs_value_tiles(problem: Problem, product: bool) -> bool:
    """Check whether ``backward_kernel`` stores weights in place of summing gradients of values."""
    has_both_tables = problem.query_table is not None and problem.key_table is not None
    return product or has_both_tables


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
    query_rows = len(stored - {"key_term"}) * queries  # rows of all tiles that have one by query
    key_row = queries + 2 * block if "key_term" in stored else 0  # numbers in the row of a key

    def count_values(keys: int) -> int:  # of one sequence
        return query_rows * (keys + 2 * block) + key_row * keys

    if count_values(keys) <= MAX_VALUES:
        filling = -(-MIN_PROGRAMS // (keys // block))  # the GPU
        step = max(FEW_VALUES // count_values(keys), filling)
        step = min(step, MAX_VALUES // count_values(keys))
        slab_keys = keys
    else:
        step = 1
        most = (MAX_VALUES - count_values(0)) // (query_rows + key_row)
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
        if name == "key_term":
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
        total: the gradient of the table, ``(H, R[, D])`` of float32.
        diagonals: ``(heads, chunks, diagonals, N[, D])`` of float32.
        sequence: index of the slab's first (sentence, head) pair.
        side: layout of the tiles that were summed over.
        sign: 1 if distances grow along a row of tiles, else -1.
    """
    rows = diagonals.sum(1).flatten(1, 2)  # [heads, diagonals * N, ...]
    # The row at the first diagonal's first column: the last block of rows, at its N zeros.
    low = side.row_of_distance_zero + sign * (side.column_start - side.row_start - side.rows)
    if sign < 0:  # distances fall, so the last diagonal has the lowest ones
        rows = rows.flip(1)
        low -= rows.size(1) - 1
    start, end = max(0, low), min(side.table_rows, low + rows.size(1))
    heads = (sequence + torch.arange(rows.size(0), device=diagonals.device)) % side.heads
    total[heads, start:end] += rows[:, start - low : end - low]
