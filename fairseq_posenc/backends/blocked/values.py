"""What the weights of a block gather: values, and a table's rows by distance."""

from __future__ import annotations

from torch import Tensor

from fairseq_posenc.backends.blocked.bands import Band
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry
from fairseq_posenc.backends.blocked.reset import Line, lines


class Values:
    """The values of a chunk.

    Args:
        geometry: of the call.
        chunk: which sentences and heads.
        value: ``(c, S, D)``.
        table: ``(G, R, D)`` or None.
    """

    def __init__(
        self, geometry: Geometry, chunk: Chunk, value: Tensor, table: Tensor | None
    ) -> None:
        self.geometry, self.chunk, self.value, self.table = geometry, chunk, value, table

    def gathered(self, block: Block, weights: Tensor) -> Tensor:
        """Return what weights ``(c, M, W)`` gather, ``(c, M, D)``."""
        gathered = weights @ self.value[:, block.keys]
        if self.table is None:
            return gathered
        weights, at_lines = self.by_distance(block, weights)
        band = self.band(self.table, block, weights)
        gathered += band.sums(band.spread(weights.unflatten(1, (-1, self.geometry.tile))))
        for line, weight in at_lines:
            row = line.row_of(self.table)
            gathered[line.heads, line.queries] += weight.sum(2, keepdim=True) * row
        return gathered

    def by_distance(
        self, block: Block, weights: Tensor
    ) -> tuple[Tensor, list[tuple[Line, Tensor]]]:
        """Return the weights without those of first tokens, and these."""
        crossing = list(lines(self.geometry, self.chunk, block))
        if not crossing:
            return weights, []
        weights = weights.clone()
        at_lines = []
        for line in reversed(crossing):
            at_lines.append((line, line.of(weights).clone()))
            line.of(weights).zero_()
        return weights, at_lines

    def band(self, table: Tensor, block: Block, weights: Tensor) -> Band:
        """Return the rows that a block's queries meet."""
        count, queries, keys = weights.shape
        return Band(table, block.corner, count, queries, keys, self.geometry.tile)


class ValueGradients:
    """Takes the gradients of what was gathered, block by block, to values and table.

    Args:
        values: of the chunk.
        value: turned, ``(c, D, S)``, to add to.
        table: to add to; None where it needs no gradient.
    """

    def __init__(self, values: Values, value: Tensor, table: Tensor | None) -> None:
        self.values, self.value, self.table = values, value, table

    def add(self, block: Block, weights: Tensor, grad: Tensor) -> Tensor:
        """Add the gradients for that of what a block gathered; return that of its weights.

        Args:
            block: of the chunk.
            weights: ``(c, M, W)``.
            grad: ``(c, M, D)``.
        """
        values = self.values
        self.value[:, :, block.keys].baddbmm_(grad.transpose(1, 2), weights)
        grad_weights = grad @ values.value[:, block.keys].transpose(1, 2)
        if values.table is None:
            return grad_weights
        band = values.band(values.table, block, weights)
        by_table = band.scores(grad).flatten(1, 2)
        for line in lines(values.geometry, values.chunk, block):
            of_line = grad[line.heads, line.queries] * line.row_of(values.table)
            line.of(by_table).copy_(of_line.sum(2, keepdim=True))
        if self.table is not None:
            weights, at_lines = values.by_distance(block, weights)
            wide = band.spread(weights.unflatten(1, (-1, values.geometry.tile)))
            band.add_to(self.table, wide, grad)
            for line, weight in at_lines:
                row = line.row_of(self.table)
                of_line = weight.sum(2, keepdim=True) * grad[line.heads, line.queries]
                row += of_line.sum(1, keepdim=True).sum_to_size(row.shape)
        return grad_weights.add_(by_table)
