"""The backward pass, slab after slab: starts the kernels and collects their results.

``key_kernel`` computes the scores again and stores the gradients of their parts, pair by pair, in
*tiles* (:class:`~fairseq_posenc.backends.triton.problem.Tiles`). Matrix products of tiles then give
the gradients of queries and tables.

Slab: some sequences (heads of a sentence), or some keys of one, whose tiles are stored at a time;
see :mod:`~fairseq_posenc.backends.triton.slabs`. H heads, R distances, D head size, N side of a
tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.backward import key_kernel
from fairseq_posenc.backends.triton.problem import Problem, Saved, Side, Slab, Tiles, TrainedTables
from fairseq_posenc.backends.triton.sizes import choose_warps
from fairseq_posenc.backends.triton.slabs import (
    add_diagonals,
    choose_stored,
    describe_key_side,
    describe_query_side,
    make_zero_tiles,
    needs_value_tiles,
    split_slabs,
)
from fairseq_posenc.backends.triton.stored import rows_kernel, table_kernel

PROGRAMS = 512  # enough to fill a GPU, few enough to keep small what they write


class Gradients:
    """Computes the gradients of a problem's inputs."""

    def __init__(self, problem: Problem, product: bool, trained: TrainedTables) -> None:
        self.problem = problem
        self.stored = choose_stored(problem, product, trained)
        # `key_kernel` lacks the registers for products with tables and the sums of key gradients.
        self.keys_from_tiles = problem.has_vectors
        self.values_from_tiles = needs_value_tiles(problem, product)
        self.query = torch.empty_like(problem.query, dtype=torch.float32)
        self.key = torch.empty_like(problem.key)
        self.value = torch.empty_like(problem.value)
        # By table, `(H, R, D)` or `(H, R)` of float32; None for one not trained.
        self.tables = {
            name: self._make_zeros(getattr(problem, name)) if needed else None
            for name, needed in trained._asdict().items()
        }

    def run(self, saved: Saved, options: dict[str, Any]) -> None:
        """Compute everything; ``options`` are those that ``choose_options`` compiles with."""
        tiles, last = None, None
        self.sizes = {key: options[key] for key in ("FULL", "N", "W", "num_warps", "num_stages")}
        # Where terms of tables are multiplied, `key_kernel` only stores tiles: the gradients of
        # keys and values come later. So no tile goes into another `tl.dot`, and more warps can
        # share them.
        key_options = {**options, "num_warps": choose_warps(spread=options["PRODUCT"])}
        for slab in split_slabs(self.problem, options["N"], self.stored):
            # Slabs of one layout write the same places; the zeros around them stay.
            if tiles is None or last != slab.layout:
                tiles, last = make_zero_tiles(self.problem, slab, self.stored), slab.layout
            blocks = slab.sequences * slab.layout.keys // options["N"]
            grads = (
                None if self.keys_from_tiles else self.key,
                None if self.values_from_tiles else self.value,
            )
            key_kernel[(blocks,)](
                self.problem, saved, slab.sequence, slab.layout, tiles, *grads, **key_options
            )
            self._write_values(slab, tiles, saved)
            self._write_queries_and_keys(slab, tiles)
            self._add_to_tables(slab, tiles, saved)
        # The stored weights lack the factor of dropout, so multiply the sums by it once.
        if (value_table := self.tables["value_table"]) is not None:
            value_table.mul_(self.problem.dropout_scale)
        # Stored gradients are multiplied by the scale, but a bias is added after scaling.
        if (bias := self.tables["bias"]) is not None:
            bias.div_(self.problem.scale)

    def cast(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Cast the gradients to the shapes and types of the inputs.

        They are those of :class:`~fairseq_posenc.backends.triton.attention.Attention`.
        """
        tensors = [self.query, self.key, self.value, *self.tables.values()]
        return [
            None if x is None or y is None else x.sum_to_size(y.shape).type_as(y)
            for x, y in zip(tensors, inputs)
        ]

    def _make_zeros(self, table: Any) -> Tensor:
        """Make zeros for the gradient of a table, ``(H, R[, D])`` of float32."""
        rows = self.problem.tgt_len + self.problem.src_len - 1
        size = (self.problem.width,) if table.rows.dim() == 3 else ()
        return torch.zeros(self.problem.heads, rows, *size, device=table.rows.device)

    def _write_queries_and_keys(self, slab: Slab, tiles: Tiles) -> None:
        """Write or add to the gradients of queries; write those of keys if tiles give them."""
        problem, layout = self.problem, slab.layout
        # In a plain sum the query term's gradient equals the content's, and is not stored again.
        query_tiles = tiles.content if tiles.query is None else tiles.query
        operands: tuple[Any, ...] = (
            *(tiles.content, problem.key, query_tiles, problem.query_table),
            self.query,
        )
        side = describe_query_side(problem, layout)
        blocks = slab.sequences * layout.queries // self.sizes["N"]
        add = layout.start > 0  # to the sums over earlier keys, which an earlier slab wrote
        rows_kernel[(blocks,)](slab.sequence, side, *operands, ADD=add, SIGN=1, **self.sizes)
        if self.keys_from_tiles:
            operands = tiles.content, problem.query, tiles.key, problem.key_table, self.key
            side = describe_key_side(problem, layout)
            blocks = slab.sequences * layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](slab.sequence, side, *operands, ADD=False, SIGN=-1, **self.sizes)

    def _write_values(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Write the gradients of values if tiles give them."""
        if self.values_from_tiles:
            side = describe_key_side(self.problem, slab.layout)._replace(
                factor=self.problem.dropout_scale
            )
            operands = tiles.weights, saved.grad, None, None, self.value
            blocks = slab.sequences * slab.layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](slab.sequence, side, *operands, ADD=False, SIGN=-1, **self.sizes)

    def _add_to_tables(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Add to the gradients of the tables."""
        problem, content = self.problem, tiles.content
        queries, keys = (
            describe_query_side(problem, slab.layout),
            describe_key_side(problem, slab.layout),
        )
        # Of each table: tiles of its term's gradient, the vectors that its rows were multiplied
        # with (None for numbers), the tiles' layout, and 1 if distances grow along a row, else -1.
        products = (
            (content if tiles.query is None else tiles.query, problem.query, queries, 1),
            (tiles.key, problem.key, keys, -1),
            (tiles.weights, saved.grad, queries, 1),
            (tiles.gain, None, queries, 1),
            (content if tiles.bias is None else tiles.bias, None, queries, 1),
        )
        for table, (tile, x, side, sign) in zip(self.tables.values(), products):
            if table is not None:
                rows = self._sum_diagonals(slab, tile, x, side)
                add_diagonals(table, rows, slab.sequence, side, sign)

    def _sum_diagonals(
        self, slab: Slab, tile: Tensor | None, x: Tensor | None, side: Side
    ) -> Tensor:
        """Compute the gradient of a table, ``(heads, chunks, diagonals, N[, D])`` of float32."""
        assert tile is not None
        block = self.sizes["N"]
        heads = min(self.problem.heads, slab.sequences)
        diagonals = (slab.layout.queries + slab.layout.keys) // block
        chunks = min(-(-slab.sequences // heads), -(-PROGRAMS // (heads * diagonals)))
        size = (block,) if x is None else (block, self.problem.width)
        by_diagonal = tile.new_empty(heads, chunks, diagonals, *size, dtype=torch.float32)
        sizes = slab.sequences, heads, chunks
        table_kernel[(heads * chunks * diagonals,)](
            slab.sequence, side, tile, x, by_diagonal, *sizes, **self.sizes
        )
        return by_diagonal
