"""Computes the output of a block: values of keys and table rows, summed by attention weights.

A block is M queries of a chunk (c pairs of sentence and head) and the W keys that they may see. A
value table has a row for each distance, which is added to the value of the key. If the first token
is *reset*, its pairs have two other rows instead. These pairs are one column and one row of the
block, the *reset lines*, whose weights are taken out before the others are summed by distance.

Shapes: D head size; G tables (1 for all heads, or one each), R rows of a table.
"""

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.operands import Operands
from fairseq_posenc.backends.blocked.reset import ResetLines, add_reset_rows, expand_reset_rows
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE
from fairseq_posenc.backends.blocked.spread import BlockRows, add_pairs
from fairseq_posenc.backends.forward_cache import copy_if_kept


class Values:
    """Sums the values of a block by its weights, and computes the gradients of the sums.

    Args:
        block: queries and keys of a chunk.
        operands: tensors of the chunk.
        lines: the block's reset lines; None without a reset.
        rows: multiplies queries with the value table's rows; None without a table.
    """

    def __init__(
        self, block: Block, operands: Operands, lines: ResetLines | None, rows: BlockRows | None
    ) -> None:
        self.block = block
        self.lines = lines
        self.rows = rows
        self.value = operands.value[:, block.keys]
        self.table = operands.value_table

    def sum_by_weights(self, weights: Tensor) -> Tensor:
        """Sum values and table rows by weights ``(c, M, W)``: ``(c, M, D)``."""
        gathered = weights @ self.value  # [c, M, D]
        if self.table is None or self.rows is None:
            return gathered
        gathered = copy_if_kept(gathered)
        weights, reset_weights = self._split_weights(weights)
        if reset_weights is not None:
            gathered.baddbmm_(reset_weights, expand_reset_rows(self.table, reset_weights))
        gathered += self.rows.sum_weighted_rows(self.rows.arrange_by_row(weights))
        return gathered

    def add_gradients(self, weights: Tensor, grad: Tensor, totals: Operands) -> Tensor:
        """Add to the gradients of values and table; return that of the weights, ``(c, M, W)``.

        Args:
            weights: ``(c, M, W)``.
            grad: gradient of the block's output, ``(c, M, D)``.
            totals: gradients of the chunk's operands, to add to; None where none is needed.
        """
        totals.value[:, :, self.block.keys].baddbmm_(grad.transpose(1, 2), weights)  # [c, D, W]
        weight_grad = grad @ self.value.transpose(1, 2)  # [c, M, W]
        if self.table is None or self.rows is None:
            return weight_grad
        by_distance = self.rows.multiply(grad)
        if self.lines is None:
            add_pairs(weight_grad, by_distance)
        else:
            pairs = torch.zeros_like(weight_grad)
            add_pairs(pairs, by_distance)
            for line, numbers in zip(self.lines, self.lines.multiply(self.table, grad, QUERY_SIDE)):
                line.put(pairs, numbers)
            weight_grad.add_(pairs)
        if totals.value_table is not None:
            weights, reset_weights = self._split_weights(weights)
            if reset_weights is not None:
                add_reset_rows(totals.value_table, reset_weights.transpose(1, 2) @ grad)
            sums = self.rows.arrange_by_row(weights)
            self.rows.add_table_gradient(totals.value_table, sums, grad)
        return weight_grad

    def _split_weights(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split weights into those by distance, ``(c, M, W)``, and the reset's, ``(c, M, 2)``."""
        if self.lines is None:
            return weights, None
        weights = weights.clone()
        return weights, self.lines.sum_by_member(*self.lines.take(weights), QUERY_SIDE)
