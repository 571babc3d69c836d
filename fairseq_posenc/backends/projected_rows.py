"""Keeps rows of DeBERTa's table as projected by a layer, for later steps of decoding.

H heads, D head size, R rows of a step, C embedding size.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from fairseq_posenc.encodings.terms import ProjectRows, Terms
from fairseq_posenc.positions import Positions


class ProjectedRows:
    """The rows that a layer has projected in the steps so far; none before the first step.

    Rows are known by the distances at which they start, but the lowest row has no start: R rows
    have R - 1 starts. Steps add lower rows, in front of the others: with the starts (-1, 0) kept
    (three rows), a step with (-2, -1, 0) projects only its lowest row, of the distances up to -3.
    """

    def __init__(self) -> None:
        self.starts: tuple[int, ...] = ()  # of all rows but the lowest, ascending
        self.tables: tuple[Tensor, Tensor] | None = None  # as queries and as keys, `(H, R, D)`

    def project(self, terms: Terms, positions: Positions, project: ProjectRows) -> Terms:
        """Project a step's rows by distance; keep them for later steps, except in training.

        ``project`` projects rows with the layer's own weights, as queries and as keys.
        """
        term = terms.rows("layer")  # the table that all layers share; each layer projects its rows
        # A compiled graph serves all lengths, and would not if it read where rows start.
        if term is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return terms.projected(project)
        rows, runs = term.table[0], term.runs  # `(R, C)`, and which distances share one
        whole = range(2 - positions.src_len, positions.tgt_len)  # without runs, a row each
        starts = tuple(whole if runs is None else runs.starts)
        if not starts or term.ids is not None:  # one row has no start; ids select from all rows
            return terms.projected(project)
        new = bisect_left(starts, self.starts[0]) if self.starts else 0  # rows below the kept ones
        merged = starts[:new] + self.starts
        first = bisect_left(merged, starts[0])  # at which the step's rows begin
        # There may be a gap: with (-2, 0) kept, a step with (-3, 0) has no row of -2.
        if self.tables is None or merged[first : first + len(starts)] != starts:
            merged, first, self.tables = starts, 0, project(rows)
        elif new:
            pairs = zip(project(rows[:new]), self.tables)  # new rows and kept ones
            as_queries, as_keys = (torch.cat(pair, 1) for pair in pairs)
            self.tables = as_queries, as_keys
        self.starts = merged
        as_queries, as_keys = (x.narrow(1, first, len(starts) + 1) for x in self.tables)  # R rows
        return terms.projected(lambda _: (as_queries, as_keys))  # the rows are projected already
