"""Keeps rows of DeBERTa's table as projected by a layer, for later steps of decoding.

H heads, D head size, R rows of a step, C embedding size.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from fairseq_posenc.encodings.terms import ProjectRows, Terms
from fairseq_posenc.positions import Positions


class ProjectedRows:
    """The rows that the steps so far have projected; none before the first step.

    Rows are known by the distances at which they start, but the lowest row has no start: R rows
    have R - 1 starts. Steps add lower rows, in front of the others: with the starts (-1, 0) kept
    (three rows), a step with (-2, -1, 0) projects only its lowest row, of the distances up to -3.
    """

    def __init__(self) -> None:
        self.starts: tuple[int, ...] = ()  # of all rows but the lowest, ascending
        self.tables: tuple[Tensor, Tensor] | None = None  # as queries and as keys, `(H, R, D)`

    def project(self, terms: Terms, positions: Positions, project: ProjectRows) -> Terms:
        """Project a step's rows of ``layer``; keep them for later steps, except in training.

        Args:
            terms: the terms of the step.
            positions: the positions of the step's tokens.
            project: projects rows with the layer's own weights, as queries and as keys.
        """
        term = terms.rows("layer")  # a table that all layers share, and each of them projects
        # A compiled graph serves all lengths, and would not if it read where rows start.
        if term is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return terms.projected(project)
        rows, runs = term.table[0], term.runs  # `(R, C)`, and which distances share one
        whole = range(2 - positions.src_len, positions.tgt_len)  # without runs, a row each
        starts = tuple(whole if runs is None else runs.starts)
        if not starts or term.ids is not None:  # one row has no start; ids select from all rows
            return terms.projected(project)
        # The `new` lowest starts are not kept; the others must be the kept ones from `first` on. If
        # both numbers are above 0, there is a gap: with (-2, 0) kept, (-3, 0) lacks row -2.
        new = bisect_left(starts, self.starts[0]) if self.starts else len(starts)
        first = bisect_left(self.starts, starts[new]) if new < len(starts) else 0
        continues = self.starts[first : first + len(starts) - new] == starts[new:]
        if self.tables is None or not continues or (new and first):
            first = 0
            self.starts, self.tables = starts, project(rows)
        elif new:
            as_queries, as_keys = (
                torch.cat(pair, 1) for pair in zip(project(rows[:new]), self.tables)
            )
            self.starts, self.tables = (*starts[:new], *self.starts), (as_queries, as_keys)
        as_queries, as_keys = (x.narrow(1, first, len(starts) + 1) for x in self.tables)  # R rows
        return terms.projected(lambda _: (as_queries, as_keys))  # the rows are projected already
