"""Contextual position encoding (CoPE): positions count the tokens that a query finds relevant."""

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("cope")
class Cope(Encoding):
    """A key's distance is a sum of gates; each gate says how much a token in between counts.

    Equation:
        e_ij = z_ij + (1 - f) (q_i.a_p) + f (q_i.a_u), where z_ij = q_i.k_j / sqrt(d); the gates
        sigmoid(z_it) of the keys from j to i add up to p + f, p a whole number and at most P - 1;
        u = p + 1.
    Shapes:
        a ``(P, d)`` in each layer, P the option ``positions``; its heads share it.
    Parameters:
        m * P * d
    Source:
        Golovneva et al. (2024), "Contextual Position Encoding", arXiv:2405.18719, section 4 and
        appendix B.
    Differs:
        a starts at 0. With ``window(first=F)``, hidden keys between the first ones and the window
        do not count.
    """

    acts_on = "scores"
    takes_ids = "unread"
    causal_reason = "it counts back from the query"
    cost = Cost("7 h n^2", "6 h n^2")

    def __init__(self, dims: Dims, *, positions: int = 64) -> None:
        super().__init__(dims)
        self.table = nn.Parameter(torch.empty(positions, dims.head_dim))

    def reset_parameters(self) -> None:
        """Start at 0."""
        nn.init.zeros_(self.table)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the table; attention counts the positions, as they depend on the scores."""
        return Terms(counted_table=self.table)
