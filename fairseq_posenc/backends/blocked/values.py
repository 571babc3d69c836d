"""Weighted sums of a block: values, and a table's rows by distance.

Band and skew: see :mod:`~fairseq_posenc.backends.blocked.skew`. Reset and its lines: see
:mod:`~fairseq_posenc.backends.blocked.reset`.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table; c pairs of sentence and head in a chunk, M queries and W keys of a block, N queries
or keys of a tile.
"""

from __future__ import annotations

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.operands import Operands
from fairseq_posenc.backends.blocked.reset import ResetLines, add_reset_rows, reset_rows
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE, Band


class Values:
    """The values of a block; ``lines`` are those of the first token, None without a reset."""

    def __init__(
        self, block: Block, operands: Operands, lines: ResetLines | None, tile: int
    ) -> None:
        self.block, self.lines, self.tile = block, lines, tile
        self.value, self.table = operands.value[:, block.keys], operands.value_table

    def gather(self, weights: Tensor) -> Tensor:
        """Sum values and table rows by weights ``(c, M, W)``: ``(c, M, D)``."""
        gathered = weights @ self.value  # [c, M, D]
        if self.table is None:
            return gathered
        weights, reset_weights = self._split(weights)
        if reset_weights is not None:
            gathered.baddbmm_(reset_weights, reset_rows(self.table, reset_weights))
        band = Band(self.table, self.block, QUERY_SIDE, self.tile)
        gathered += band.sums(band.skew(weights))
        return gathered

    def add_gradients(self, weights: Tensor, grad: Tensor, totals: Operands) -> Tensor:
        """Add the gradients for that of a block's output; return that of its weights.

        Args:
            weights: ``(c, M, W)``.
            grad: ``(c, M, D)``.
            totals: the chunk's part, to add to; None for what needs no gradient.
        """
        totals.value[:, :, self.block.keys].baddbmm_(grad.transpose(1, 2), weights)  # [c, D, W]
        weight_grad = grad @ self.value.transpose(1, 2)  # [c, M, W]
        if self.table is None:
            return weight_grad
        band = Band(self.table, self.block, QUERY_SIDE, self.tile)
        by_table = band.scores(grad).flatten(1, 2)  # [c, M, W]
        if self.lines is not None:
            for line, numbers in zip(self.lines, self.lines.products(self.table, grad, QUERY_SIDE)):
                line.put(by_table, numbers)
        if totals.value_table is not None:
            weights, reset_weights = self._split(weights)
            if reset_weights is not None:
                add_reset_rows(totals.value_table, reset_weights.transpose(1, 2) @ grad)
            band.add_to(totals.value_table, band.skew(weights), grad)
        return weight_grad.add_(by_table)

    def _split(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the weights into those by distance and the reset's, ``(c, M, W), (c, M, 2)``."""
        if self.lines is None:
            return weights, None
        weights = weights.clone()
        return weights, self.lines.sum_by_member(*self.lines.take(weights), QUERY_SIDE)
