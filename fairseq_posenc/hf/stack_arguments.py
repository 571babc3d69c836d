"""Reads the arguments with which a model of transformers calls a stack of layers.

By default tokens are counted from 0, and padding is left out. Whatever else callers say of tokens
(:class:`Tokens`) is stored in the cache with their keys, and joined to that of later tokens.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import Tokens
from fairseq_posenc.modules.stack_positions import join_ids, read_position_ids
from fairseq_posenc.positions import may_sync, reading_waits
from fairseq_posenc.specs import Spec

_CACHES = ("cache", "past_key_values")  # the keyword of transformers, and the name before
_WHERE_PLACES_MATTER = ("input", "softmax", "positions")  # not only distances


class StackArguments:
    """The arguments of a forward pass of a stack.

    Args:
        names: names of the parameters of the stack's ``forward``, in order.
        args: arguments by position.
        named: arguments by name.
        spec: spec of the stack.
        boundary_id: token that ends a sentence, or a document of ``documents``; None if unknown.
        is_native: whether transformers makes the masks, and so separates packed texts.
        first_id: number of a row's first token in the caller's position ids. If it is above 0,
            ``first_id - 1`` is the padding symbol.

    Attributes:
        named: all arguments by name. The model's code gets them after methods here, and the
            caller, have changed them.
        ids: the caller's position ids, ``(B or 1, T)`` or ``(B or 1, T, axes)``, or None.

    Raises:
        UserError: position ids are on axes that the encodings do not have.
    """

    def __init__(
        self,
        names: list[str],
        args: tuple[Any, ...],
        named: dict[str, Any],
        spec: Spec,
        boundary_id: int | None,
        is_native: bool,
        first_id: int,
    ) -> None:
        self.names = names
        self.named = {**dict(zip(names, args)), **named}
        self.spec = spec
        self.boundary_id = boundary_id
        self.is_native = is_native
        self.has_documents = any(item.name == "documents" for item in spec.items)
        ids: Tensor | None = self.named.get("position_ids")
        if ids is not None and ids.dim() not in (2, 3):
            raise UserError(f"position_ids {tuple(ids.shape)} must be (batch or 1, new tokens)")
        if ids is not None and ids.dim() == 3:
            # [axes, B or 1, T]. The model's code expects two dimensions, so it gets the first axis.
            self.named["position_ids"] = ids[0]
            # This checks the type and the axes. The batch is not known yet: see `read_tokens`.
            ids = read_position_ids(
                "position_ids", ids, spec, batch=ids.size(1), lengths=(ids.size(2),)
            )
        if first_id and (ids is None or ids.dim() == 2):
            ids = self._count_from_0(ids, first_id)
        self.ids = ids

    def _count_from_0(self, ids: Tensor | None, first_id: int) -> Tensor | None:
        """Convert ids that begin after the padding symbol; refuse padding without a mask."""
        tokens: Tensor | None = self.named.get("input_ids")
        if ids is None:
            if tokens is None or self.named.get("attention_mask") is not None:
                return None
            if may_sync(tokens.device) and tokens.eq(first_id - 1).any():
                raise UserError("input_ids have padding: pass attention_mask")
            return None
        if may_sync(ids.device) and (ids < first_id - 1).any():
            raise UserError(f"position_ids of this model count from {first_id}, as its class does")
        return (ids - first_id).clamp(min=0)

    @property
    def inputs(self) -> Tensor | None:
        """The new tokens, ``(B, T)``, or their embeddings, ``(B, T, C)``."""
        tokens: Tensor | None = self.named.get("input_ids")
        return self.named.get("inputs_embeds") if tokens is None else tokens

    @property
    def cache(self) -> Any:
        """The cache of keys and values, or None."""
        caches = (self.named.get(name) for name in _CACHES)
        return next((cache for cache in caches if cache is not None), None)

    @property
    def past(self) -> int:
        """The number of tokens in the cache, as a number in any case."""
        return int(self._count_cached())

    def _count_cached(self) -> Any:
        """Count the tokens in the cache; a static cache returns a tensor, which graphs can use."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def refuse_block_mask(self) -> None:
        """Refuse a mask of FlexAttention, which no other attention takes."""
        if isinstance(self.named.get("attention_mask"), BlockMask):
            raise UserError("attention_mask: BlockMask needs attn_implementation='flex_attention'")

    def add_mask_if_ids_jump(self) -> None:
        """Add a mask of ones if position ids jump, unless they count several documents.

        Without a mask, transformers begins a document wherever ids do not grow by one. That is
        right only for ids that count each document's tokens from 0, which several axes never do.
        """
        ids = self.ids
        inputs = self.inputs
        if ids is None or inputs is None or self.named.get("attention_mask") is not None:
            return
        if not may_sync(ids.device) or ids.diff(dim=1).eq(1).all():
            return
        if ids.dim() == 3 or not _is_packed(ids).any():
            shape = inputs.size(0), self.past + inputs.size(1)
            self.named["attention_mask"] = ids.new_ones(shape, dtype=torch.long)

    def ids_or_count(self) -> Tensor | None:
        """Return the caller's ids, or the count of the new tokens, ``(B or 1, T)``, if any."""
        inputs = self.inputs
        if self.ids is not None or inputs is None:
            return self.ids
        mask = self.named.get("attention_mask")
        tgt_len = inputs.size(1)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return _count_tokens(mask.ne(0))[:, mask.size(1) - tgt_len :]
        return (torch.arange(tgt_len, device=inputs.device) + self._count_cached()).unsqueeze(0)

    def read_mask(self, batch: int, src_len: int) -> Tensor | None:
        """Read the mask ``(B, S)``: 0 for padding, else 1, or the number of a document."""
        mask = self.named.get("attention_mask")
        if isinstance(mask, dict):
            # `generate` makes a mask for each type of layer: by `make_mask`, all are the padding.
            mask = next(iter(mask.values()))
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.shape != (batch, src_len):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UserError(
                f"attention_mask {shape} must be ({batch}, {src_len}), 1 for tokens "
                "and 0 for padding, those in the cache included; windows and documents belong to "
                "the spec"
            )
        return mask.to(self._device)

    @property
    def _device(self) -> torch.device:
        assert self.inputs is not None
        return self.inputs.device

    def read_tokens(self, batch: int, mask: Tensor | None, earlier: Tokens | None) -> Tokens:
        """Read what the caller says of all tokens.

        Args:
            batch: B.
            mask: result of :meth:`read_mask`.
            earlier: what was stored of the tokens in the cache, if anything.

        Raises:
            UserError: the arguments do not fit the batch, the spec or the cache.
        """
        ids = self.ids
        assert self.inputs is not None
        tgt_len = self.inputs.size(1)
        if ids is not None and (ids.size(0) not in (1, batch) or ids.size(1) != tgt_len):
            raise UserError(f"position_ids {tuple(ids.shape)} must be ({batch} or 1, {tgt_len})")
        ends = self._find_ends(batch, earlier)
        padding = None if mask is None else mask.eq(0)
        documents: Tensor | None = self.named.pop("document_ids", None)  # the model has none
        if documents is not None and not self.has_documents:
            raise UserError(f"document_ids: {self.spec} must have +documents")
        if not self.has_documents:
            if not self.is_native:  # else that was checked before
                self.refuse_packed(mask)
        elif documents is None and self.boundary_id is None:
            if ids is not None and ids.dim() == 3:
                raise UserError("position_ids on several axes do not separate documents")
            begins = self._find_begins(batch, mask)
            documents = begins.cumsum(1)
            if self.past:
                before = documents.new_zeros(batch, self.past)
                if earlier is not None and earlier.documents is not None:
                    before = earlier.documents
                documents = torch.cat([before, before[:, -1:] + documents], 1)
            if not self._places_differ(begins, padding, earlier):
                return Tokens(None, documents, ends)
        return Tokens(self._join_cached_ids(padding, earlier), documents, ends)

    def _find_ends(self, batch: int, earlier: Tokens | None) -> Tensor | None:
        """Mark the tokens that end a sentence, ``(B, S)``; None if no token is known to do so."""
        if self.boundary_id is None:
            return None
        tokens: Tensor | None = self.named.get("input_ids")
        if tokens is None:
            raise UserError("boundary_id: pass input_ids, in which the ends of sentences are found")
        ends = tokens.view(batch, -1).eq(self.boundary_id)
        if self.past and earlier is None:
            raise UserError("the cache has no ends of sentences: start with an empty one")
        if earlier is None or earlier.ends is None:
            return ends
        return torch.cat([earlier.ends, ends], 1)

    def refuse_packed(self, mask: Tensor | None, separates_ids: bool = False) -> None:
        """Refuse several documents in a row; a compiled pass raises torch's error of this text.

        Args:
            mask: the mask ``(B, S)``, if any.
            separates_ids: whether attention separates documents that ids count, without a mask.

        Raises:
            UserError: attention would mix documents.
        """
        message = (
            f"a row holds several documents, as in a packed batch: add +documents to {self.spec}, "
            "so that attention stays inside each document"
        )
        is_first = self.cache is None if self.is_native else not self.past
        ids = self.ids if mask is None and is_first else None
        packs = None if ids is None or ids.dim() != 2 else _is_packed(ids).any()
        holds_one = []
        if (lengths := self.named.get("cu_seq_lens_q")) is not None:
            holds_one.append(torch.tensor(lengths.numel() <= 2, device=lengths.device))
        if (numbers := self.named.get("seq_idx")) is not None:
            holds_one.append(~_find_changes(numbers).any())
        if packs is not None and separates_ids:
            holds_one = [condition | packs for condition in holds_one]
        elif packs is not None:
            holds_one.append(~packs)
        assert self.inputs is not None
        if mask is not None and mask.dtype != torch.bool and mask.size(1) == self.inputs.size(1):
            holds_one.append(mask.le(1).all())
        for condition in holds_one:
            if torch.compiler.is_compiling() or reading_waits(condition.device):
                torch._assert_async(condition, message)
            elif not condition:
                raise UserError(message)

    def _find_begins(self, batch: int, mask: Tensor | None) -> Tensor:
        """Mark the new tokens that begin a document, ``(B, T)``.

        A document begins where ids do not grow by one, where the numbers in the mask change, and
        where ``cu_seq_lens_q`` and ``seq_idx`` say so. The first token of a row may be marked.
        """
        assert self.inputs is not None
        tgt_len = self.inputs.size(1)
        begins = torch.zeros(batch, tgt_len, dtype=torch.bool, device=self._device)
        if self.ids is not None:
            steps = self.ids.diff(dim=1, prepend=self.ids[:, :1] - 1)  # [B or 1, T]
            begins = begins | steps.ne(1)
            if self.past:  # a single document goes on, unless a new one begins
                begins[:, :1] |= self.ids[:, :1].eq(0)
        if (numbers := self.named.get("seq_idx")) is not None:
            begins = begins | _find_changes(numbers.to(self._device))
        lengths = self.named.get("cu_seq_lens_q")
        if lengths is not None and lengths.numel() > 2:
            if self.past:
                raise UserError("cu_seq_lens_q: pass position_ids of the new tokens instead")
            first = torch.zeros(begins.numel() + 1, dtype=torch.bool, device=self._device)
            first[lengths.long().clamp(max=begins.numel())] = True
            begins = begins | first[:-1].view_as(begins)
        if mask is not None:
            # Padding takes the number before it: 1 1 0 2 2 as 1 1 1 2 2.
            places = torch.arange(mask.size(1), device=self._device)
            last = torch.where(mask.ne(0), places, 0).cummax(1).values
            changes = _find_changes(mask.long().gather(1, last))
            is_token = mask.ne(0)[:, -tgt_len:]
            begins = (begins | changes[:, -tgt_len:]) & is_token
        return begins

    def _places_differ(
        self, begins: Tensor, padding: Tensor | None, earlier: Tokens | None
    ) -> bool:
        """Check whether ids differ from the count in each document, where that matters."""
        absolute = any(item.encoding.acts_on in _WHERE_PLACES_MATTER for item in self.spec.items)
        if self.ids is None or not absolute or self.past:
            return earlier is not None and earlier.ids is not None
        if not may_sync(self._device):
            return True  # in a graph values cannot be read
        is_first = torch.zeros_like(begins)
        is_first[:, 0] = True
        if padding is not None:
            is_first = ~padding & (~padding).cumsum(1).eq(1)
        return bool((self.ids.ne(0) & (begins | is_first)).any())

    def _join_cached_ids(self, padding: Tensor | None, earlier: Tokens | None) -> Tensor | None:
        """Join the caller's ids to those of the cached tokens; None if ids only count tokens."""
        ids = self.ids
        cached = None if earlier is None else earlier.ids
        if ids is None:
            if cached is not None:
                raise UserError(
                    "the tokens in the cache had position_ids: give those of the new ones"
                )
            return None
        past = self.past
        if cached is not None:
            before = cached
        else:
            is_token = ids.new_ones(1, past + ids.size(1)) if padding is None else ~padding
            counted = _count_tokens(is_token)  # [B or 1, S]
            new_padding = None if padding is None else padding[:, past:]
            if not self.has_documents and self._only_count(ids, counted[:, past:], new_padding):
                return None
            before = counted[:, :past]
        rows = max(before.size(0), ids.size(0))
        if before.size(0) not in (1, rows) or ids.size(0) not in (1, rows):
            raise UserError(
                f"position_ids are of {ids.size(0)} rows, but those of the tokens in the cache of "
                f"{before.size(0)}"
            )
        return join_ids(before.expand(rows, *before.shape[1:]), ids.expand(rows, *ids.shape[1:]))

    def _only_count(self, ids: Tensor, counted: Tensor, padding: Tensor | None) -> bool:
        """Check whether ids, perhaps on axes, are the count ``(B or 1, T)``, except at padding."""
        if not may_sync(ids.device):
            return False  # in a graph values cannot be read
        if self.past and reading_waits(ids.device):
            # Each step of decoding would wait for the device. Ids of the first pass were compared.
            return True
        differs = ids.ne(counted) if ids.dim() == 2 else ids.ne(counted[..., None]).any(-1)
        return not (differs if padding is None else differs & ~padding).any()

    def uses_cache(self, stack: PreTrainedModel) -> bool:
        """Check whether the pass uses a cache, which the model's code may still have to make."""
        if stack.training and getattr(stack, "gradient_checkpointing", False):
            return False  # as transformers does
        uses_cache = self.named.get("use_cache")
        return bool(getattr(stack.config, "use_cache", False) if uses_cache is None else uses_cache)

    def need_cache(self, stack: PreTrainedModel) -> Any:
        """Return the cache of self-attention, or None if the pass uses none.

        If the model's code would make a cache later, it is made here, and added to the arguments.
        """
        config = stack.config
        if self.cache is None and self.uses_cache(stack):
            name = next(name for name in _CACHES if name in self.names)
            cache: Any = DynamicCache(config=config)
            if config.is_encoder_decoder or self.named.get("encoder_hidden_states") is not None:
                cache = EncoderDecoderCache(cache, DynamicCache(config=config))
            self.named[name] = cache
        return getattr(self.cache, "self_attention_cache", self.cache)


def _count_tokens(is_token: Tensor) -> Tensor:
    """Number the tokens of each row from 0, ``(B, S)``; padding repeats the number before it."""
    return (is_token.cumsum(1) - 1).clamp(min=0)


def _find_changes(numbers: Tensor) -> Tensor:
    """Mark the elements of ``(B, S)`` that differ from the one before them."""
    return numbers.diff(dim=1, prepend=numbers[:, :1]).ne(0)


def _is_packed(ids: Tensor) -> Tensor:
    """Check whether each row of ids, ``(B or 1, T)``, counts tokens and starts again from 0."""
    steps = ids.diff(dim=1)
    starts_again = (steps < 0).any(dim=1)
    counts_or_starts = (steps.eq(1) | ids[:, 1:].eq(0)).all(dim=1)
    return starts_again & counts_or_starts
