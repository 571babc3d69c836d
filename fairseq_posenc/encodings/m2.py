"""A trained number for each signed distance, multiplying the score (Huang's method 2)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.distance_table import DistanceEncoding


@register("m2")
class M2(DistanceEncoding):
    """The dot product is multiplied by a trained number for each signed distance.

    Equation:
        e_ij = (q_i.k_j) * a_r / sqrt(c d), where r = clip(j - i, -K, K) and a_r is a number.
    Shapes:
        table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (2K+1)
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 2.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    vectors = False
    start = 1.0
    term_fields = ("gain",)
