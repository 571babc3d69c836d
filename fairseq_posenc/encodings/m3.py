"""A trained vector for each distance inside the dot product (Huang's method 3)."""

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.distance_table import DistanceEncoding


@register("m3")
class M3(DistanceEncoding):
    """Query, key and a trained vector for the signed distance are multiplied channel by channel.

    Equation:
        e_ij = sum_t q_it k_jt a_rt / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 3.
    Differs:
        the vectors start at 1, which is plain attention; the paper gives no initial values. No
        matrix product computes this form, so it costs D passes over the scores.
    """

    start = 1.0
    term_fields = ("channel_gain",)
