"""The backward pass, wave after wave: which kernels it starts, and where their results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.triton.backward import key_kernel
from fairseq_posenc.backends.triton.problem import Problem, Saved, Side, Tiles, Wave
from fairseq_posenc.backends.triton.sizes import warps
from fairseq_posenc.backends.triton.slabs import (
    empty_tiles,
    fold,
    key_side,
    late_keys,
    late_values,
    query_side,
    stored,
    waves,
)
from fairseq_posenc.backends.triton.stored import rows_kernel, table_kernel

PROGRAMS = 512  # enough to fill a GPU, few enough to keep small what they write


class Gradients:
    """The gradients of a problem's inputs.

    Args:
        problem: the problem.
        product: whether the terms are combined by product.
        wanted: which of query table, key table, value table, gain and bias need a gradient.
    """

    def __init__(self, problem: Problem, product: bool, wanted: tuple[bool, ...]) -> None:
        self.problem, self.wanted = problem, wanted
        self.stored = stored(problem, product, wanted)
        self.late_keys, self.late_values = late_keys(problem), late_values(problem, product)
        self.query = torch.empty_like(problem.query, dtype=torch.float32)
        self.key = torch.empty_like(problem.key)
        self.value = torch.empty_like(problem.value)
        self.tables = [self._table(x) if want else None for x, want in zip(problem[3:8], wanted)]

    def run(self, saved: Saved, options: dict[str, Any]) -> None:
        """Compute everything, with the options of the large kernels."""
        tiles, last = None, None
        self.sizes = {key: options[key] for key in ("FULL", "N", "W", "num_warps", "num_stages")}
        # Where most tiles are held at a time, and none of their products is multiplied again.
        key_options = {**options, "num_warps": warps(spread=options["PRODUCT"])}
        for wave in waves(self.problem, options["N"], self.stored):
            if tiles is None or last != wave.layout:
                tiles, last = empty_tiles(self.problem, wave, self.stored), wave.layout
            blocks = wave.sequences * wave.layout.keys // options["N"]
            grads = (
                None if self.late_keys else self.key,
                None if self.late_values else self.value,
            )
            key_kernel[(blocks,)](
                self.problem, saved, wave.sequence, wave.layout, tiles, *grads, **key_options
            )
            self._values(wave, tiles, saved)
            self._rows(wave, tiles)
            self._tables(wave, tiles, saved)
        # The kernels leave out what can be multiplied once.
        value_table, bias = self.tables[2], self.tables[4]
        if value_table is not None:
            value_table *= self.problem.gained
        if bias is not None:
            bias /= self.problem.scale

    def of(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs of :class:`Attention`, in their types."""
        found = [self.query, self.key, self.value, *self.tables]
        return [
            None if x is None or y is None else x.sum_to_size(y.shape).type_as(y)
            for x, y in zip(found, inputs)
        ]

    def _table(self, table: Any) -> Tensor:
        rows = self.problem.tgt_len + self.problem.src_len - 1
        size = (self.problem.width,) if table.rows.dim() == 3 else ()
        return torch.zeros(self.problem.heads, rows, *size, device=table.rows.device)

    def _rows(self, wave: Wave, tiles: Tiles) -> None:
        """Write or add to the gradients of queries, and those of keys if they are left."""
        problem, layout = self.problem, wave.layout
        tile = tiles.content if tiles.query is None else tiles.query
        given: tuple[Any, ...] = tiles.content, problem.key, tile, problem.query_table, self.query
        side = query_side(problem, layout)
        blocks = wave.sequences * layout.queries // self.sizes["N"]
        add = layout.start > 0
        rows_kernel[(blocks,)](wave.sequence, side, *given, ADD=add, SIGN=1, **self.sizes)
        if self.late_keys:
            given = tiles.content, problem.query, tiles.key, problem.key_table, self.key
            side = key_side(problem, layout)
            blocks = wave.sequences * layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](wave.sequence, side, *given, ADD=False, SIGN=-1, **self.sizes)

    def _values(self, wave: Wave, tiles: Tiles, saved: Saved) -> None:
        """Write the gradients of values if they are left."""
        if self.late_values:
            side = key_side(self.problem, wave.layout)._replace(factor=self.problem.gained)
            given = tiles.weights, saved.grad, None, None, self.value
            blocks = wave.sequences * wave.layout.keys // self.sizes["N"]
            rows_kernel[(blocks,)](wave.sequence, side, *given, ADD=False, SIGN=-1, **self.sizes)

    def _tables(self, wave: Wave, tiles: Tiles, saved: Saved) -> None:
        """Add to the gradients of the tables."""
        problem, content = self.problem, tiles.content
        queries, keys = query_side(problem, wave.layout), key_side(problem, wave.layout)
        found = (
            (content if tiles.query is None else tiles.query, problem.query, queries, 1),
            (tiles.key, problem.key, keys, -1),
            (tiles.weights, saved.grad, queries, 1),
            (tiles.gain, None, queries, 1),
            (content if tiles.bias is None else tiles.bias, None, queries, 1),
        )
        for table, (tile, x, side, sign) in zip(self.tables, found):
            if table is not None:
                fold(table, self._bands(wave, tile, x, side), wave.sequence, side, sign)

    def _bands(self, wave: Wave, tile: Tensor | None, x: Tensor | None, side: Side) -> Tensor:
        """Return the gradient of a table, ``(heads, chunks, diagonals, N[, D])`` of float32."""
        assert tile is not None
        block = self.sizes["N"]
        heads = min(self.problem.heads, wave.sequences)
        diagonals = (wave.layout.queries + wave.layout.keys) // block
        chunks = min(-(-wave.sequences // heads), -(-PROGRAMS // (heads * diagonals)))
        size = (block,) if x is None else (block, self.problem.width)
        band = tile.new_empty(heads, chunks, diagonals, *size, dtype=torch.float32)
        sizes = wave.sequences, heads, chunks
        table_kernel[(heads * chunks * diagonals,)](
            wave.sequence, side, tile, x, band, *sizes, **self.sizes
        )
        return band
