"""Packed documents: blocks of several documents that do not see each other."""

from typing import Literal

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.positions import Positions


@register("documents")
class Documents(Encoding):
    """Positions restart in each document of a block, and attention stays inside it.

    Equation:
        key j is visible to query i only if both are of one document; p_i counts the real tokens
        of the document before i.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Krell et al. (2021), "Efficient Sequence Packing without Cross-contamination",
        arXiv:2107.02027, sections 3.2.2 and 3.2.3.
    Differs:
        tokens mark the ends of documents: every ``</s>`` with ``end=eos``; with ``end=empty`` a
        ``</s>`` that follows another one (an empty line). In an encoder, the end is the last token
        of its document; in a causal model it is the first token of the next one, because fairseq
        puts it before the token that it predicts. A masked ``</s>`` ends a document only in models
        trained with ``include_target_tokens``.
    """

    acts_on = "mask"
    shared = True
    whole_stack = True

    def __init__(self, dims: Dims, *, end: Literal["eos", "empty"] = "eos") -> None:
        super().__init__(dims)
        self.end = end

    def number(self, positions: Positions) -> Positions:
        """Let positions start anew with each document."""
        return positions.split_documents(self.end == "empty", self.dims.causal)

    def locality(self, positions: Positions) -> Locality:
        """Limit attention to the tokens of one document."""
        # Tokens of one document share its start, which serves as its number.
        return Locality(segments=positions.document_starts, documents=True)
