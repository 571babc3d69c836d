"""Chunks: attention that stays inside stretches of a fixed length."""

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.positions import Positions


@register("chunk")
class Chunk(Encoding):
    """Sentences are cut into chunks of C tokens, and attention stays inside each.

    Equation:
        key j is visible to query i if floor(p_i / C) = floor(p_j / C), with p counted from the
        first real token; causal: and j <= i.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        the text layers of Llama 4 that have rotary positions.
    Differs:
        nothing.
    """

    acts_on = "mask"
    shared = True

    def __init__(self, dims: Dims, *, size: int = 8192) -> None:
        super().__init__(dims)
        self.size = size

    def locality(self, positions: Positions) -> Locality:
        """Number the chunk of each token."""
        return Locality(segments=positions.common_ids() // self.size, longest=self.size)
