"""No position encoding."""

from fairseq_posenc.encodings.base import Encoding, register


@register("none")
class NoEncoding(Encoding):
    """Nothing is added: the model sees a bag of words, unless its layers are causal or directed.

    Equation:
        x_i = w_i, where w_i is the token embedding.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        the ablation of Luo et al. (2022), "DecBERT", arXiv:2204.08688, and of causal language
        models since.
    Differs:
        nothing.
    """

    acts_on = "input"
    takes_ids = "unread"
