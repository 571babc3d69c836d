"""Relative vectors: their products with query and key, multiplied (M4M)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.m4 import M4


@register("m4m")
class M4M(M4):
    """As ``m4``, but the three dot products are multiplied.

    Equation:
        e_ij = (q_i.k_j) * (q_i.a_r) * (k_j.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2021), "Multiplicative Position-aware Transformer Models for Language
        Understanding", arXiv:2109.12788, equation 20.
    Differs:
        the options are those of ``m4``.
    """

    product = True
