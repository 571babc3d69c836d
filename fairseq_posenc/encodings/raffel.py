"""A trained number for each distance, added to the score (Raffel et al. without buckets)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.distance_table import DistanceEncoding
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("raffel")
class Raffel(DistanceEncoding):
    """A trained number for each signed distance is added to the dot product.

    Equation:
        e_ij = (q_i.k_j + a_r) / sqrt(c d), where r = clip(j - i, -K, K) and a_r is a number.
    Shapes:
        table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (2K+1)
    Source:
        Raffel et al. (2020), arXiv:1910.10683, in the form of Huang et al. (2021),
        arXiv:2109.12788, equation 10.
    Differs:
        no buckets and a table in each layer; ``t5`` is Raffel's own form.
    """

    vectors = False

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the scaled rows as bias, ``(G, R)``."""
        return Terms(
            bias=self.table.rows(span) * self.dims.scale(self.scale_factor),
            scale_factor=self.scale_factor,
            first=self.table.mark_first(positions),
        )
