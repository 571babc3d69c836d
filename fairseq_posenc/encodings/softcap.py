"""A cap of the scores: they approach a limit smoothly, before the softmax."""

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


@register("softcap")
class Softcap(Encoding):
    """No score is larger than a cap or smaller than its negative.

    Equation:
        w_ij = softmax_j(c * tanh(e_ij / c)), where e_ij is the whole score, a temperature included,
        and c is ``cap``. Masks come after it, and a sink is not capped.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Gemma 2 (``attn_logit_softcapping``), arXiv:2408.00118, section 2.
    Differs:
        nothing; transformers' sdpa leaves the cap out, and no backend here does.
    """

    acts_on = "softmax"

    def __init__(self, dims: Dims, *, cap: float = 50.0) -> None:
        super().__init__(dims)
        self.cap = cap

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the cap of the scores."""
        return Terms(softcap=self.cap)
