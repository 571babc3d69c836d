"""Relative vectors: their products with query and key, added (Huang's method 4)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.distance_table import DistanceEncoding


@register("m4")
class M4(DistanceEncoding):
    """The dot products of query and key with a trained vector for the signed distance are added.

    Equation:
        e_ij = (q_i.k_j + q_i.a_r + k_j.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 4; ``relative_key_query`` in Hugging Face's BERT.
    Differs:
        nothing with the default options.
    """

    term_fields = ("query_table", "key_table")
