"""Dot products of positions (TUPE as in the M4M paper)."""

from typing import Optional

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.distance_table import DistanceEncoding
from fairseq_posenc.encodings.precision import at_least_fp32, no_autocast
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("tupe")
class Tupe(DistanceEncoding):
    """The dot product of trained absolute positions and a number per distance are added.

    Equation:
        e_ij = (q_i.k_j + (p_i U_Q).(p_j U_K)) / sqrt(c d) + b_r,
        where r = clip(j - i, -K, K) and c = 2.
    Shapes:
        positions ``(n, D)``, U_Q and U_K ``(D, D)``, table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (n * d + 2 * d^2 + 2K+1)
    Source:
        Ke et al. (2021), "Rethinking Positional Encoding in Language Pre-training",
        arXiv:2006.15595, in the form of Huang et al. (2021), arXiv:2109.12788, equation 14;
        ``tupe+reset`` is equation 15, which they trained.
    Differs:
        Huang et al. count one projection; ``tie_projections`` (U_K = U_Q) gives their number. With
        ``reset`` the first token's numbers replace the whole positional part. ``tupe_shared`` is
        the form of the authors' code.
    """

    vectors = False
    cost = Cost("", "", "4 n d^2 + 2 n^2 d", "2 n d")

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        scale_factor: float = 2.0,
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
        self.positions = nn.Parameter(torch.empty(dims.max_positions, dims.head_dim))
        self.query_projection = nn.Parameter(torch.empty(size))
        # Tied, both names are one parameter; torch counts, draws and trains it once.
        self.key_projection = (
            self.query_projection if tie_projections else nn.Parameter(torch.empty(size))
        )

    @property
    def max_positions(self) -> int:
        """The number of positions."""
        return self.positions.size(0)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compare positions by pair, ``(B or 1, 1, T, S)``, and the bias.

        Raises:
            UserError: a position lies beyond the table.
        """
        positions.check_limit(self.dims.max_positions, self.name)
        rows = positions.common_ids()
        if rows.size(1) > self.dims.max_positions:  # no more than padding is beyond
            rows = rows.clamp(max=self.dims.max_positions - 1)
        vectors = at_least_fp32(self.positions[rows])  # [B or 1, S, D]
        first = self.table.mark_first(positions)
        if first is not None:  # nothing of its pairs is left
            vectors = vectors.masked_fill(first[..., None], 0.0)
        with no_autocast(vectors.device):
            queries = positions.queries(vectors) @ at_least_fp32(self.query_projection)
            keys = vectors @ at_least_fp32(self.key_projection) * self.dims.scale(self.scale_factor)
            pairs = queries @ keys.transpose(1, 2)  # [B or 1, T, S]
        bias, runs = self.table.select(span)
        return Terms(
            bias=bias,
            pair_bias=pairs.unsqueeze(1),
            scale_factor=self.scale_factor,
            first=first,
        ).with_runs(runs)
