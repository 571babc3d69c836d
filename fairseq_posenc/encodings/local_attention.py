"""Local attention, as in ``rope+window``: a query sees keys of its window, chunk or document."""

from typing import Literal

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.positions import Positions


@register("window")
class Window(Encoding):
    """Each query sees only the keys of a window around it.

    Equation:
        causal: key j is visible to query i if i - W < j <= i, that is, W keys with its own; in
        an encoder: if abs(j - i) <= W // 2. With ``first``, keys at positions below it are visible
        as well, on visible sides of the same document. With ``prefill``, a token that is computed
        alone after a cache (a generated one) has no window; several at once (a prompt) have it.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Beltagy et al. (2020), "Longformer", arXiv:2004.05150, section 3.1; the bounds are those of
        Mistral (causal) and of ModernBERT (encoders); ``first`` as in Xiao et al. (2024),
        arXiv:2309.17453; ``prefill`` as in "Sliding Window Attention Adaptation", arXiv:2512.10411.
    Differs:
        an encoder's layer that sees only earlier or only later tokens sees W keys, including its
        own. With ``first``, positions are those of the text, not those in the cache.
    """

    acts_on = "mask"
    shared_by_layers = True  # one module, called once in a pass

    def __init__(
        self, dims: Dims, *, size: int = 512, first: int | None = None, prefill: bool = False
    ) -> None:
        super().__init__(dims)
        if prefill and not dims.causal:
            raise UserError("window: prefill is for causal models, which generate token by token")
        self.size = size
        self.first = first
        self.prefill = prefill
        self.axes = 0 if first is None else 1  # positions are read only for the first keys

    def mask(self, positions: Positions) -> Mask:
        """Limit the distance of keys. Padding is never one of the first keys."""
        if self.prefill and positions.tgt_len == 1 and positions.src_len > 1:
            return NO_MASK  # for a generated token
        limits = Mask(window=self.size, prefill=self.prefill)  # `prefill`: caches keep all keys
        if self.first is None:
            return limits
        first_keys = positions.ids < self.first  # [B or 1, S]
        if (padding := positions.padding) is not None:
            first_keys = first_keys & ~padding
        return limits._replace(first_keys=first_keys)


@register("chunk")
class Chunk(Encoding):
    """Sentences are cut into chunks of ``size`` tokens, and attention stays inside each.

    Equation:
        key j is visible to query i if floor(p_i / L) = floor(p_j / L), where L is ``size`` and p is
        counted from the first real token; causal: and j <= i.
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
    shared_by_layers = True  # one module, called once in a pass

    def __init__(self, dims: Dims, *, size: int = 8192) -> None:
        super().__init__(dims)
        self.size = size

    def mask(self, positions: Positions) -> Mask:
        """Limit attention to the tokens of one chunk."""
        longest = self.size if positions.counted else None  # a caller's ids may repeat
        return Mask(segments=positions.compact_ids() // self.size, longest_segment=longest)


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
        Krell et al. (2021), arXiv:2107.02027, sections 3.2.2 and 3.2.3.
    Differs:
        tokens mark the ends of documents: every ``</s>`` with ``end=eos``; with ``end=empty`` a
        ``</s>`` that follows another one (an empty line). In an encoder, the end is the last token
        of its document; in a causal model it is the first token of the next one, because fairseq
        puts it before the token that it predicts. A ``</s>`` that a masked LM hides ends a document
        only with fairseq's option ``include_target_tokens``.
    """

    acts_on = "mask"
    axes = 0  # it reads no position ids: it makes positions
    shared_by_layers = True  # one module, called once in a pass
    whole_stack = True  # also layers whose part of the spec does not name it

    def __init__(self, dims: Dims, *, end: Literal["eos", "empty"] = "eos") -> None:
        super().__init__(dims)
        self.end = end

    def number(self, positions: Positions) -> Positions:
        """Restart positions in each document."""
        return positions.split_documents(empty=self.end == "empty", causal=self.dims.causal)

    def mask(self, positions: Positions) -> Mask:
        """Limit attention to each document, as :meth:`number` or the caller split them before."""
        # `document_starts`, [B, S], counts the real tokens before a document, which identifies it.
        # `documents`: each segment has a first token, whose pairs have table rows of their own with
        # the option `reset` of an encoding; backends with one first token a row refuse it.
        return Mask(segments=positions.document_starts, documents=True)
