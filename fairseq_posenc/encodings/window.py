"""Sliding windows: a query sees only keys near it."""

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.positions import Positions


@register("window")
class Window(Encoding):
    """Each query sees only the keys of a window around it.

    Equation:
        causal: key j is visible to query i if i - W < j <= i, that is, W keys with its own; in
        an encoder: if abs(j - i) <= W // 2.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Beltagy et al. (2020), "Longformer", arXiv:2004.05150, section 3.1; the bounds are those of
        Mistral (causal) and of ModernBERT (encoders).
    Differs:
        a layer with a direction in an encoder sees W keys on that side, including its own.
    """

    acts_on = "mask"
    shared = True

    def __init__(self, dims: Dims, *, size: int = 512) -> None:
        super().__init__(dims)
        self.size = size

    def locality(self, positions: Positions) -> Locality:
        """Limit the distance of keys. Padding lies outside of sentences and moves no token."""
        return Locality(window=self.size)
