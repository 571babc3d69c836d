"""Relative vectors: their products with the query (Shaw et al.)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.distance_table import DistanceEncoding


@register("shaw")
class Shaw(DistanceEncoding):
    """The dot product of the query with a trained vector for the signed distance is added.

    Equation:
        e_ij = (q_i.k_j + q_i.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Shaw et al. (2018), "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, equation 4; ``relative_key`` in Hugging Face's BERT.
    Differs:
        the vectors that Shaw et al. also add to the values are in ``shaw_values``.
    """

    term_fields = ("query_table",)
