"""Keeps rows of DeBERTa's table as a layer has projected them, for later steps of decoding.

H heads, D head size, R rows of a step, C embedding size.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from fairseq_posenc.encodings.terms import ProjectRows, Terms
from fairseq_posenc.positions import Positions


class ProjectedRows:
    """The rows that the steps so far have projected; none before the first step.

    Rows are known by the distances at which they start. Steps add rows for lower distances, in
    front of the others: with the starts (-1, 0) kept, a step with (-2, -1, 0) projects its first
    row alone.
    """

    def __init__(self) -> None:
        self.starts: tuple[int, ...] = ()
        self.tables: tuple[Tensor, Tensor] | None = None  # as queries and as keys, `(H, R, D)`

    def project(self, terms: Terms, positions: Positions, project: ProjectRows) -> Terms:
        """Project the rows of ``layer`` of a step; while there are gradients, none are kept.

        Args:
            terms: the terms of the step.
            positions: the positions of the step's tokens.
            project: projects rows with the weights of the layer.
        """
        term = terms.rows("layer")
        # A compiled graph serves all lengths, and would not if it read where rows start.
        if term is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return terms.projected(project)
        rows, runs = term.table[0], term.runs  # `(R, C)`, and which distances share a row
        whole = range(2 - positions.src_len, positions.tgt_len)  # a row for each distance
        starts = tuple(whole if runs is None else runs.starts)
        if not starts or term.ids is not None:  # a single row, or rows of any distances
            return terms.projected(project)
        # `new` starts lie below those kept; the others must be the kept ones from `first` on.
        new = bisect_left(starts, self.starts[0]) if self.starts else len(starts)
        first = bisect_left(self.starts, starts[new]) if new < len(starts) else 0
        continues = self.starts[first : first + len(starts) - new] == starts[new:]
        if self.tables is None or not continues or (new and first):  # nothing kept fits, or a gap
            first = 0
            self.starts, self.tables = starts, project(rows)
        elif new:
            as_queries, as_keys = (
                torch.cat(pair, 1) for pair in zip(project(rows[:new]), self.tables)
            )
            self.starts, self.tables = (*starts[:new], *self.starts), (as_queries, as_keys)
        as_queries, as_keys = (x.narrow(1, first, len(starts) + 1) for x in self.tables)
        return terms.projected(lambda _: (as_queries, as_keys))  # the rows are projected already
