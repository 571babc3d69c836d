"""Relative vectors added to the values (the other half of Shaw et al.)."""

from typing import Optional

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.distance_table import DistanceEncoding
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("shaw_values")
class ShawValues(DistanceEncoding):
    """A trained vector for each signed distance is added to the value of the key.

    Equation:
        z_i = sum_j w_ij (v_j + a_r), where w_ij are the attention weights and
        r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Shaw et al. (2018), "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, equation 3. The paper's model is ``shaw+shaw_values``.
    Differs:
        nothing with the default options.
    """

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        reset: bool = False,
    ) -> None:
        super().__init__(dims, max_distance=max_distance, per_head=per_head, reset=reset)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows as value table, ``(G, R, D)``."""
        return Terms(value_table=self.table.rows(span), first=self.table.mark_first(positions))
