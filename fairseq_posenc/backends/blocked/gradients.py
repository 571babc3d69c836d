"""What the gradients of a chunk's blocks add up to."""

from __future__ import annotations

from torch import Tensor

from fairseq_posenc.backends.blocked.bands import sum_by_distance
from fairseq_posenc.backends.blocked.factors import Factors
from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.reset import LineGradients
from fairseq_posenc.backends.blocked.scores import Scores
from fairseq_posenc.backends.blocked.tables import Tables


class ScoreGradients:
    """Takes the gradients of scores, block by block, to queries, keys and tables.

    Args:
        scores: of the chunk.
        query: ``(c, T, D)``, to add to.
        key: turned, ``(c, D, S)``, to add to: that product is the faster one on a CPU.
        tables: to add to; None for those that need no gradient.
        lines: of the call, which takes what is theirs.
    """

    def __init__(
        self, scores: Scores, query: Tensor, key: Tensor, tables: Tables, lines: LineGradients
    ) -> None:
        self.scores, self.query, self.key, self.tables = scores, query, key, tables
        self.lines = lines

    def add(self, block: Block, factors: Factors, grad: Tensor) -> None:
        """Add the gradients for that of a block's scores, ``(c, M, W)``, which is overwritten."""
        scores = self.scores
        if self.tables.pair_bias is not None:
            total = scores.pairs_of(self.tables.pair_bias, block)
            total += scores.by_sentence(grad).sum_to_size(total.shape)
        if scores.reset.is_plain:
            self._add_content(block, factors, grad)
        # The line written last stands where two cross, so its gradient is taken out first.
        for line in reversed(scores.reset.lines(scores.chunk, block)):
            self.lines.take(line, grad)
        self._add_by_distance(block, factors, grad)
        if not scores.reset.is_plain:
            self._add_content(block, factors, grad)

    def _add_content(self, block: Block, factors: Factors, grad: Tensor) -> None:
        scores = self.scores
        content = factors.gradient("content", grad, scores.product)
        query = scores.query[:, block.queries]
        self.query[:, block.queries].baddbmm_(content, scores.key[:, block.keys])
        self.key[:, :, block.keys].baddbmm_(query.transpose(1, 2), content)

    def _add_by_distance(self, block: Block, factors: Factors, grad: Tensor) -> None:
        scores, totals, product = self.scores, self.tables, self.scores.product
        query, key = scores.query[:, block.queries], scores.key[:, block.keys]
        rows = slice(block.corner, block.corner + grad.size(1) + grad.size(2) - 1)
        tile = scores.geometry.tile
        if totals.bias is not None:
            totals.bias[:, rows].add_(sum_by_distance(_grouped(grad, totals.bias)))
        if totals.gain is not None:
            of_gain = factors.gradient("gain", grad, product)
            totals.gain[:, rows].add_(sum_by_distance(_grouped(of_gain, totals.gain)))
        if scores.tables.query_table is not None:
            band = scores.band(scores.tables.query_table, block, query, key)
            of_query = factors.gradient("by_query", grad, product)
            wide = band.spread(of_query.unflatten(1, (-1, tile)))
            self.query[:, block.queries].add_(band.sums(wide))
            if totals.query_table is not None:
                band.add_to(totals.query_table, wide, query)
        if scores.tables.key_table is not None:
            band = scores.band(scores.tables.key_table, block, key, query)
            of_key = factors.gradient("by_key", grad, product)
            wide = band.spread(of_key.unflatten(2, (-1, tile)).permute(0, 2, 3, 1))
            self.key[:, :, block.keys].add_(band.turned_sums(wide))
            if totals.key_table is not None:
                band.add_to(totals.key_table, wide, key)


def _grouped(x: Tensor, table: Tensor) -> Tensor:
    """Return ``(c, M, W)``, summed over heads that share a table: ``(G, M, W)``."""
    return x.sum(0, keepdim=True) if table.size(0) == 1 else x
