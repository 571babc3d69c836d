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

    All steps read one table, and longer steps more of its rows. A row serves the distances from its
    start to below the next row's start; that of a step's lowest row is not needed, so R rows have
    R - 1 starts. With the starts (-1, 0) kept (three rows), a step with (-2, -1, 0) projects its
    lowest row only, up to -3; the next row, which was the lowest, begins at -2.
    """

    def __init__(self) -> None:
        self.starts: tuple[int, ...] = ()  # of all rows but the lowest, ascending
        self.tables: tuple[Tensor, Tensor] | None = None  # as queries and as keys, `(H, R, D)`

    def project(self, terms: Terms, positions: Positions, project_rows: ProjectRows) -> Terms:
        """Project a step's rows by distance; keep them for later steps, without gradients.

        ``project_rows`` projects them with the layer's own weights, as queries and as keys.
        """
        term = terms.rows("layer")  # the table that all layers share; each layer projects its rows
        # A compiled graph serves all lengths, and would not if it read where rows start.
        if term is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return terms.projected(project_rows)
        rows, runs = term.table[0], term.runs  # `(R, C)`, and which distances share one
        distances = range(2 - positions.src_len, positions.tgt_len)  # all but the lowest one
        starts = tuple(distances if runs is None else runs.starts)  # None: a row for each distance
        # One row has no start. With position ids, distances may be any, so a step has all rows.
        if not starts or term.ids is not None:
            return terms.projected(project_rows)
        new = bisect_left(starts, self.starts[0]) if self.starts else 0  # rows below the kept ones
        known = starts[:new] + self.starts
        first = bisect_left(known, starts[0])  # index of the step's lowest row among them
        # A step of more queries also has later starts: then all of its rows are projected.
        if self.tables is None or known[first : first + len(starts)] != starts:
            known, first, self.tables = starts, 0, project_rows(rows)
        elif new:
            lower = project_rows(rows[:new])
            as_queries, as_keys = (torch.cat(x, 1) for x in zip(lower, self.tables))
            self.tables = as_queries, as_keys
        self.starts = known
        as_queries, as_keys = (x.narrow(1, first, len(starts) + 1) for x in self.tables)  # R rows
        return terms.with_projected(term, as_queries, as_keys)
