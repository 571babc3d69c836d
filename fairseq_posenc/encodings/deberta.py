"""Relative vectors with a projection for each side (DeBERTa as the M4M paper writes it)."""

from typing import Optional

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.distance_table import DistanceEncoding
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("deberta")
class Deberta(DistanceEncoding):
    """A trained vector for each signed distance is projected once for queries, once for keys.

    Equation:
        e_ij = (q_i.k_j + q_i.(a_r W_R) + k_j.(a_r W_T)) / sqrt(c d),
        where r = clip(j - i, -K, K) and c = 3.
    Shapes:
        table ``(G, 2K+1, D)``, W_R and W_T ``(D, D)`` in each layer.
    Parameters:
        m * ((2K+1) * d + 2 * d^2)
    Source:
        He et al. (2021), "DeBERTa", arXiv:2006.03654, in the form of Huang et al. (2021),
        arXiv:2109.12788, equation 13. ``deberta_v2`` equals Hugging Face's DebertaV2.
    Differs:
        Huang et al. count one projection; ``tie_projections`` (W_T = W_R) gives their number. With
        ``reset``, pairs with the first token have two rows of their own in the table.
    """

    cost = Cost(common_operations="4 u d^2", common_numbers="2 u d")

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        scale_factor: float = 3.0,
        reset: bool = False,
        tie_projections: bool = False,
    ) -> None:
        super().__init__(
            dims,
            max_distance=max_distance,
            per_head=per_head,
            scale_factor=scale_factor,
            reset=reset,
        )
        size = (dims.head_dim, dims.head_dim)
        self.query_projection = nn.Parameter(torch.empty(size))
        # Tied, both names are one parameter; torch counts, draws and trains it once.
        self.key_projection = (
            self.query_projection if tie_projections else nn.Parameter(torch.empty(size))
        )

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the projected rows as query and key table, ``(G, R, D)``."""
        rows, runs = self.table.select(span)  # [G, R, D]
        return Terms(
            query_table=rows @ self.query_projection,
            key_table=rows @ self.key_projection,
            scale_factor=self.scale_factor,
            first=self.table.mark_first(positions),
        ).with_runs(runs)
