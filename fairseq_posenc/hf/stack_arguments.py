"""Reads the arguments with which a model of transformers calls a stack of layers.

By default tokens are counted from 0, and padding is left out. Whatever else callers say of tokens
(:class:`Tokens`) is stored in the cache with their keys, and joined to that of later tokens.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import Tokens
from fairseq_posenc.modules.input_checks import join_ids, read_position_ids
from fairseq_posenc.positions import may_sync, reading_waits
from fairseq_posenc.specs import Spec

CACHE_NAMES = ("cache", "past_key_values")  # the keyword of transformers, and the name before


class StackArguments:
    """The arguments of a forward pass of a stack.

    Args:
        named: all arguments of the stack's ``forward``, by name.
        spec: spec of the stack.
        boundary_id: token that ends a sentence, or a document of ``documents``; None if unknown.
        first_id: number of a row's first token in the caller's position ids. If it is above 0,
            ``first_id - 1`` is the padding symbol.

    Attributes:
        named: the same.
        inputs: the new tokens, ``(B, T)``, or their embeddings, ``(B, T, C)``; None for neither.
        mask: the caller's mask, in any form.
        cache: the cache of the keys and values of self-attention, or None.
        ids: the caller's position ids, ``(B or 1, T)`` or ``(B or 1, T, axes)``, or None.

    Raises:
        UserError: position ids have another shape, or are on axes that the encodings do not have;
            or an argument is of this package's modules.
    """

    def __init__(
        self, named: dict[str, Any], spec: Spec, boundary_id: int | None, first_id: int
    ) -> None:
        self.spec = spec
        self.boundary_id = boundary_id
        self.named = named
        if "document_ids" in named:
            raise UserError("document_ids: pass position_ids that begin at 0 in each document")
        self.tokens: Tensor | None = self.named.get("input_ids")
        embeddings: Tensor | None = self.named.get("inputs_embeds")
        self.inputs = embeddings if self.tokens is None else self.tokens
        mask = self.named.get("attention_mask")
        # `generate` makes a mask for each type of layer: by `make_mask`, all are the padding.
        self.mask = next(iter(mask.values())) if isinstance(mask, dict) else mask
        caches = (self.named.get(name) for name in CACHE_NAMES)
        cache = next((cache for cache in caches if cache is not None), None)
        self.cache = getattr(cache, "self_attention_cache", cache)  # an encoder-decoder has two
        self.ids = None if self.inputs is None else self._read_ids(self.inputs, first_id)

    def _read_ids(self, inputs: Tensor, first_id: int) -> Tensor | None:
        """Read the caller's ids; convert those that begin after the padding symbol."""
        ids: Tensor | None = self.named.get("position_ids")
        if ids is not None:
            batch, tgt_len = inputs.shape[:2]
            ids = read_position_ids("position_ids", ids, self.spec, batch, (tgt_len,))
        if not first_id or (ids is not None and ids.dim() == 3):
            return ids
        if ids is not None:
            if may_sync(ids.device) and (ids < first_id - 1).any():
                raise UserError(
                    f"position_ids of this model count from {first_id}, as its class does"
                )
            return (ids - first_id).clamp(min=0)
        counts_padding = self.tokens is not None and self.mask is None
        if counts_padding and may_sync(inputs.device) and inputs.eq(first_id - 1).any():
            raise UserError("input_ids have padding: pass attention_mask")
        return None

    @property
    def cached(self) -> Any:
        """The number of tokens in the cache; a static cache has a tensor, which graphs can use."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    @property
    def past(self) -> int:
        """The number of tokens in the cache, as a number in any case."""
        return int(self.cached)

    @property
    def places(self) -> Tensor:
        """The caller's ids, or else the places of the new tokens, ``(1, T)``."""
        assert self.inputs is not None
        if self.ids is not None:
            return self.ids
        return (torch.arange(self.inputs.size(1), device=self.inputs.device) + self.cached)[None]

    @property
    def has_documents(self) -> bool:
        """Whether attention stays inside documents."""
        return any(item.name == "documents" for item in self.spec.items)

    def read_mask(self) -> Tensor | None:
        """Read the mask ``(B, S)``: 0 for padding, else 1, or the number of a document."""
        mask = self.mask
        if mask is None:
            return None
        assert self.inputs is not None
        shape = (self.inputs.size(0), self.past + self.inputs.size(1))
        if not isinstance(mask, Tensor) or mask.shape != shape:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UserError(
                f"attention_mask {found} must be {shape}, 1 for tokens and 0 for padding, those in "
                "the cache included; windows and documents belong to the spec"
            )
        return mask.to(self.inputs.device)

    def read_tokens(self, mask: Tensor | None, earlier: Tokens | None) -> Tokens:
        """Read what the caller says of all tokens.

        Args:
            mask: result of :meth:`read_mask`.
            earlier: what was stored of the tokens in the cache, if anything.

        Raises:
            UserError: the arguments do not fit the spec or the cache.
        """
        documents = None
        if self.has_documents and self.boundary_id is None:
            documents = self._find_documents(mask, earlier)
        padding = None if mask is None else mask.eq(0)
        ids = self._join_cached_ids(padding, documents, earlier)
        return Tokens(ids, documents, self._find_ends(earlier))

    def _find_ends(self, earlier: Tokens | None) -> Tensor | None:
        """Mark the tokens that end a sentence, ``(B, S)``; None if no token is known to do so."""
        if self.boundary_id is None:
            return None
        if self.tokens is None:
            raise UserError("boundary_id: pass input_ids, in which the ends of sentences are found")
        ends = self.tokens.eq(self.boundary_id)
        if not self.past:
            return ends
        if earlier is None or earlier.ends is None:
            raise UserError("the cache has no ends of sentences: start with an empty one")
        return torch.cat([earlier.ends, ends], 1)

    def find_packed_ids(self) -> Tensor | None:
        """Check whether ids count the tokens of several documents in a row.

        Returns:
            A bool; None without ids on one axis, with a mask, or if tokens are cached.
        """
        ids = self.ids
        cached = self.cached
        starts = not isinstance(cached, Tensor) and not cached
        if ids is None or ids.dim() == 3 or self.mask is not None or not starts:
            return None
        steps = ids.diff(dim=1)
        counts_or_starts = (steps.eq(1) | ids[:, 1:].eq(0)).all(dim=1)
        return (counts_or_starts & (steps < 0).any(dim=1)).any()

    def refuse_packed(self) -> None:
        """Refuse several documents in a row, unless the spec separates them.

        Raises:
            UserError: attention would mix documents; in a compiled pass, torch's error of its text.
        """
        if self.has_documents:
            return
        assert self.inputs is not None
        mixed = []  # each is true if documents are packed
        if (starts := self._find_starts()) is not None:
            mixed.append(starts.any())
        if (by_ids := self.find_packed_ids()) is not None:
            mixed.append(by_ids)
        if self.mask is not None and self.mask.size(1) == self.inputs.size(1):
            mixed.append(self.mask.gt(1).any())
        message = (
            f"a row holds several documents, as in a packed batch: add +documents to {self.spec}, "
            "so that attention stays inside each document"
        )
        for is_packed in mixed:
            if torch.compiler.is_compiling() or reading_waits(is_packed.device):
                torch._assert_async(~is_packed, message)
            elif is_packed:
                raise UserError(message)

    def _find_starts(self) -> Tensor | None:
        """Mark the tokens, ``(B, T)``, at which ``cu_seq_lens_q`` and ``seq_idx`` begin documents.

        Returns:
            None if neither was given.
        """
        assert self.inputs is not None
        starts = None
        if (numbers := self.named.get("seq_idx")) is not None:
            starts = _find_changes(numbers)
        lengths = self.named.get("cu_seq_lens_q")
        if lengths is not None and lengths.numel() > 2:
            if self.past:
                raise UserError("cu_seq_lens_q: pass position_ids of the new tokens instead")
            batch, tgt_len = self.inputs.shape[:2]
            first = lengths.new_zeros(batch * tgt_len + 1, dtype=torch.bool)
            first[lengths.long().clamp(max=batch * tgt_len)] = True
            first = first[:-1].view(batch, tgt_len)
            starts = first if starts is None else starts | first
        return starts

    def _find_documents(self, mask: Tensor | None, earlier: Tokens | None) -> Tensor:
        """Number the documents of a row, ``(B, S)``.

        A document begins where ids do not grow by one, where the numbers in the mask change, and
        where :meth:`_find_starts` says so. The first token of a row may begin another.
        """
        assert self.inputs is not None
        batch, tgt_len = self.inputs.shape[:2]
        device = self.inputs.device
        begins = self._find_starts()
        if begins is None:
            begins = torch.zeros(batch, tgt_len, dtype=torch.bool, device=device)
        if self.ids is not None and self.ids.dim() == 3:
            raise UserError("position_ids on several axes do not separate documents")
        if self.ids is not None:
            steps = self.ids.diff(dim=1, prepend=self.ids[:, :1] - 1)  # [B or 1, T]
            begins = begins | steps.ne(1)
            if self.past:  # a single document goes on, unless a new one begins
                begins[:, :1] |= self.ids[:, :1].eq(0)
        if mask is not None:
            # Padding takes the number before it: 1 1 0 2 2 as 1 1 1 2 2.
            places = torch.arange(mask.size(1), device=device)
            last = torch.where(mask.ne(0), places, 0).cummax(1).values
            changes = _find_changes(mask.long().gather(1, last))
            begins = (begins | changes[:, -tgt_len:]) & mask.ne(0)[:, -tgt_len:]
        documents = begins.cumsum(1)
        if not self.past:
            return documents
        before = documents.new_zeros(batch, self.past)
        if earlier is not None and earlier.documents is not None:
            before = earlier.documents
        return torch.cat([before, before[:, -1:] + documents], 1)

    def _join_cached_ids(
        self, padding: Tensor | None, documents: Tensor | None, earlier: Tokens | None
    ) -> Tensor | None:
        """Join the caller's ids to those of the cached tokens; None if ids only count tokens."""
        ids = self.ids
        cached = None if earlier is None else earlier.ids
        if ids is None and cached is not None:
            raise UserError("the tokens in the cache had position_ids: give those of the new ones")
        if ids is None:
            return None
        if cached is None:
            past = self.past
            is_token = ids.new_ones(1, past + ids.size(1)) if padding is None else (~padding).long()
            counted = _count_tokens(is_token, documents)  # [B or 1, S]
            new_padding = None if padding is None else padding[:, past:]
            if self._only_count(ids, counted[:, past:], new_padding):
                return None
            cached = counted[:, :past]
        rows = max(cached.size(0), ids.size(0))
        return join_ids(cached.expand(rows, *cached.shape[1:]), ids.expand(rows, *ids.shape[1:]))

    def _only_count(self, ids: Tensor, counted: Tensor, padding: Tensor | None) -> bool:
        """Check whether ids, perhaps on axes, are the count ``(B or 1, T)``, except at padding."""
        if not may_sync(ids.device):
            return False  # in a graph values cannot be read
        if self.past and reading_waits(ids.device):
            # Each step of decoding would wait for the device. Ids of the first pass were compared.
            return True
        differs = ids.ne(counted) if ids.dim() == 2 else ids.ne(counted[..., None]).any(-1)
        return not (differs if padding is None else differs & ~padding).any()


def _count_tokens(is_token: Tensor, documents: Tensor | None) -> Tensor:
    """Number the tokens of each row, or of each document, from 0, ``(B or 1, S)``.

    Padding, where ``is_token`` is 0 and not 1, has no meaningful number.
    """
    before = is_token.cumsum(1) - is_token  # tokens before each one
    if documents is None:
        return before
    begins = _find_changes(documents)
    return before - torch.where(begins, before, 0).cummax(1).values


def _find_changes(numbers: Tensor) -> Tensor:
    """Mark the elements of ``(B, S)`` that differ from the one before them."""
    return numbers.diff(dim=1, prepend=numbers[:, :1]).ne(0)
