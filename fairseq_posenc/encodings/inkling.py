"""Inkling: a state of each query is multiplied with a trained vector of the distance.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("inkling")
class Inkling(Encoding):
    """The query's state, a narrow projection, is multiplied with a trained vector of the distance.

    Equation:
        e_ij = q_i.k_j / sqrt(d) + s_i.p_r, where the state s_i is W_h x_i, x is the input of the
        layer, and r = j - i. p_r is 0 from a distance of E on.
    Shapes:
        W ``(H * rank, C)`` and p ``(E, rank)`` in each layer; its heads share p. An encoder has
        2E-1 rows, also for later keys.
    Parameters:
        m * rank * (h * C + E); in an encoder m * rank * (h * C + 2E-1)
    Source:
        Inkling (2026), ``r_proj``, ``d_rel`` (rank) and ``rel_extent`` (E) of
        ``InklingAttention`` in Hugging Face's transformers. The model has no other positions. Its
        layers without a window also have ``logn(factor=0.1,length=N)``; in the others, E is the
        length of the window.
    Differs:
        the model is causal, normalises queries and keys, and divides by d in place of its root. E
        is by default the smaller of 1024 and n.
    """

    acts_on = "scores"
    cost = Cost(operations="2 h n C w", numbers="h n w")  # of the states, whose width w is `rank`

    def __init__(self, dims: Dims, *, rank: int = 16, extent: Optional[int] = None) -> None:
        super().__init__(dims)
        self.extent = min(1024, dims.max_positions) if extent is None else extent
        # Rows are for the distances j - i from 1 - extent to `last_distance`.
        self.last_distance = 0 if dims.causal else self.extent - 1
        self.projection = nn.Linear(dims.embed_dim, dims.num_heads * rank, bias=False)
        self.table = nn.Parameter(torch.empty(self.extent + self.last_distance, rank))

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a loaded table to this one's extent, with rows of zeros for larger distances."""
        missing = len(self.table) - len(weight)
        if name != "table" or missing <= 0:
            return weight
        missing_later = missing // 2 if self.last_distance > 0 else 0  # those of later keys
        return F.pad(weight, (0, 0, missing - missing_later, missing_later))

    def states(self, x: Tensor) -> Tensor:
        """Project the input of the layer, ``(B, T, C)``, to states ``(B, H, T, rank)``."""
        states: Tensor = self.projection(x)
        return states.unflatten(-1, (self.dims.num_heads, -1)).transpose(1, 2)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows, ``(1, R, rank)``, with rows of zeros for distances beyond the table."""
        rows = F.pad(self.table[None], (0, 0, 1, 1))  # one row of zeros before, one after
        starts = range(1 - self.extent, self.last_distance + 2)  # of all rows but the first
        kept, runs = Runs.select(starts, span)
        return Terms(state_table=rows[:, kept]).with_runs(runs)
