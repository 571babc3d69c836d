"""The backward pass, slab after slab: starts the kernels and collects their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.backward import key_kernel
from fairseq_posenc.backends.triton.problem import Problem, Saved, Side, Slab, Tiles
from fairseq_posenc.backends.triton.sizes import choose_warps
from fairseq_posenc.backends.triton.slabs import (
    add_band,
    choose_stored,
    empty_tiles,
    key_side,
    keys_from_tiles,
    query_side,
    split_slabs,
    values_from_tiles,
)
from fairseq_posenc.backends.triton.stored import rows_kernel, table_kernel

PROGRAMS = 512  # enough to fill a GPU, few enough to keep small what they write


class Gradients:
    """The gradients of a problem's inputs.

    ``wanted`` says which of query table, key table, value table, gain and bias need one.
    """

    def __init__(self, problem: Problem, product: bool, wanted: tuple[bool, ...]) -> None:
        self.problem, self.wanted = problem, wanted
        self.stored = choose_stored(problem, product, wanted)
        self.keys_from_tiles = keys_from_tiles(problem)
        self.values_from_tiles = values_from_tiles(problem, product)
        self.query = torch.empty_like(problem.query, dtype=torch.float32)
        self.key = torch.empty_like(problem.key)
        self.value = torch.empty_like(problem.value)
        self.tables = [self._table(x) if want else None for x, want in zip(problem[3:8], wanted)]

    def run(self, saved: Saved, options: dict[str, Any]) -> None:
        """Compute everything, with the options of the large kernels."""
        tiles, last = None, None
        self.sizes = {key: options[key] for key in ("FULL", "N", "W", "num_warps", "num_stages")}
        # This kernel holds most tiles, and feeds no product of them into another `tl.dot`.
        key_options = {**options, "num_warps": choose_warps(spread=options["PRODUCT"])}
        for slab in split_slabs(self.problem, options["N"], self.stored):
            if tiles is None or last != slab.layout:
                tiles, last = empty_tiles(self.problem, slab, self.stored), slab.layout
            blocks = slab.sequences * slab.layout.keys // options["N"]
            grads = (
                None if self.keys_from_tiles else self.key,
                None if self.values_from_tiles else self.value,
            )
            key_kernel[(blocks,)](
                self.problem, saved, slab.sequence, slab.layout, tiles, *grads, **key_options
            )
            self._values(slab, tiles, saved)
            self._rows(slab, tiles)
            self._tables(slab, tiles, saved)
        # The kernels leave out what can be multiplied once.
        value_table, bias = self.tables[2], self.tables[4]
        if value_table is not None:
            value_table *= self.problem.dropout_scale
        if bias is not None:
            bias /= self.problem.scale

    def cast(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Cast the gradients to the shapes and types of the inputs of :class:`Attention`."""
        found = [self.query, self.key, self.value, *self.tables]
        return [
            None if x is None or y is None else x.sum_to_size(y.shape).type_as(y)
            for x, y in zip(found, inputs)
        ]

    def _table(self, table: Any) -> Tensor:
        rows = self.problem.tgt_len + self.problem.src_len - 1
        size = (self.problem.width,) if table.rows.dim() == 3 else ()
        return torch.zeros(self.problem.heads, rows, *size, device=table.rows.device)

    def _rows(self, slab: Slab, tiles: Tiles) -> None:
        """Write or add to the gradients of queries, and those of keys if they are left."""
        problem, layout = self.problem, slab.layout
        tile = tiles.content if tiles.query is None else tiles.query
        given: tuple[Any, ...] = tiles.content, problem.key, tile, problem.query_table, self.query
        side = query_side(problem, layout)
        blocks = slab.sequences * layout.queries // self.sizes["N"]
        add = layout.start > 0
        rows_kernel[(blocks,)](slab.sequence, side, *given, ADD=add, SIGN=1, **self.sizes)
        if self.keys_from_tiles:
            given = tiles.content, problem.query, tiles.key, problem.key_table, self.key
            side = key_side(problem, layout)
            blocks = slab.sequences * layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](slab.sequence, side, *given, ADD=False, SIGN=-1, **self.sizes)

    def _values(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Write the gradients of values if they are left."""
        if self.values_from_tiles:
            side = key_side(self.problem, slab.layout)._replace(factor=self.problem.dropout_scale)
            given = tiles.weights, saved.grad, None, None, self.value
            blocks = slab.sequences * slab.layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](slab.sequence, side, *given, ADD=False, SIGN=-1, **self.sizes)

    def _tables(self, slab: Slab, tiles: Tiles, saved: Saved) -> None:
        """Add to the gradients of the tables."""
        problem, content = self.problem, tiles.content
        queries, keys = query_side(problem, slab.layout), key_side(problem, slab.layout)
        found = (
            (content if tiles.query is None else tiles.query, problem.query, queries, 1),
            (tiles.key, problem.key, keys, -1),
            (tiles.weights, saved.grad, queries, 1),
            (tiles.gain, None, queries, 1),
            (content if tiles.bias is None else tiles.bias, None, queries, 1),
        )
        for table, (tile, x, side, sign) in zip(self.tables, found):
            if table is not None:
                add_band(table, self._bands(slab, tile, x, side), slab.sequence, side, sign)

    def _bands(self, slab: Slab, tile: Tensor | None, x: Tensor | None, side: Side) -> Tensor:
        """Compute the gradient of a table, ``(heads, chunks, diagonals, N[, D])`` of float32."""
        assert tile is not None
        block = self.sizes["N"]
        heads = min(self.problem.heads, slab.sequences)
        diagonals = (slab.layout.queries + slab.layout.keys) // block
        chunks = min(-(-slab.sequences // heads), -(-PROGRAMS // (heads * diagonals)))
        size = (block,) if x is None else (block, self.problem.width)
        band = tile.new_empty(heads, chunks, diagonals, *size, dtype=torch.float32)
        sizes = slab.sequences, heads, chunks
        table_kernel[(heads * chunks * diagonals,)](
            slab.sequence, side, tile, x, band, *sizes, **self.sizes
        )
        return band
