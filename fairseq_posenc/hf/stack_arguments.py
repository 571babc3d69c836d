"""Reads the arguments with which a model of transformers calls a stack of layers.

By default tokens are counted from 0, and padding is left out. If a caller's position ids differ
from this count, the cache also stores the ids, and those of later tokens are joined to them.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.stack_positions import join_ids, read_position_ids
from fairseq_posenc.positions import may_sync, reading_waits
from fairseq_posenc.specs import Spec

_CACHED_IDS = "fairseq_posenc_position_ids"  # attribute of a cache: its tokens' ids, `(B or 1, S)`
_CACHES = ("cache", "past_key_values")  # the keyword of transformers 5, and of 4


class StackArguments:
    """The arguments of a forward pass of a stack.

    Args:
        names: names of the parameters of the stack's ``forward``, in order.
        args: arguments by position.
        named: arguments by name.
        spec: spec of the stack.

    Attributes:
        named: all arguments by name. The model's code gets them after methods here, and the
            caller, have changed them.
        ids: the caller's position ids, ``(B or 1, T)`` or ``(B or 1, T, axes)``, or None.

    Raises:
        UserError: position ids are on axes that the encodings do not have.
    """

    def __init__(
        self, names: list[str], args: tuple[Any, ...], named: dict[str, Any], spec: Spec
    ) -> None:
        self.names = names
        self.named = {**dict(zip(names, args)), **named}
        self.spec = spec
        ids: Tensor | None = self.named.get("position_ids")
        if ids is not None and ids.dim() == 3:
            # [axes, B or 1, T]. The model's code expects two dimensions, so it gets the first axis.
            self.named["position_ids"] = ids[0]
            # This checks the type and the axes. The batch is not known yet: see `read_ids`.
            ids = read_position_ids(
                "position_ids", ids, spec, batch=ids.size(1), lengths=(ids.size(2),)
            )
        self.ids = ids

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
        if ids.dim() == 3 or not _is_packed(ids):
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

    def read_padding(self, batch: int, src_len: int) -> Tensor | None:
        """Read the padding from the mask: ``(B, S)``, True for padding; None without a mask."""
        mask = self.named.get("attention_mask")
        if isinstance(mask, dict):
            # `generate` makes a mask for each type of layer: by `make_mask`, all are the padding.
            mask = next(iter(mask.values()))
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape != (batch, src_len):
            raise UserError(
                f"attention_mask {tuple(mask.shape)} must be ({batch}, {src_len}), 1 for tokens "
                "and 0 for padding, those in the cache included; windows and documents belong to "
                "the spec"
            )
        return mask.eq(0)

    def read_ids(
        self, embeddings: Tensor, padding: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read the position ids of all tokens, and the documents.

        Args:
            embeddings: embeddings of the new tokens, ``(B, T, C)``.
            padding: result of :meth:`read_padding`.

        Returns:
            Two values: the position ids, ``(B or 1, S)`` or ``(B or 1, S, axes)``, or None if they
            only count the tokens of a row or of each document; and the number of each token's
            document, ``(B, S)``, or None if the spec has no ``documents``.

        Raises:
            UserError: the ids do not fit the batch, the spec or the cache.
        """
        batch, tgt_len = embeddings.shape[:2]
        ids = self.ids
        if ids is not None and (ids.size(0) not in (1, batch) or ids.size(1) != tgt_len):
            raise UserError(f"position_ids {tuple(ids.shape)} must be ({batch} or 1, {tgt_len})")
        documents = self._read_documents(embeddings, padding)
        if documents is not None:
            return None, documents
        return self._join_cached_ids(padding), None

    def _read_documents(self, embeddings: Tensor, padding: Tensor | None) -> Tensor | None:
        """Number the document of each token: as ``document_ids`` does, or by where ids jump.

        ``document_ids`` is removed from the arguments, because the model's code does not know it.
        """
        documents: Tensor | None = self.named.pop("document_ids", None)
        if not any(item.name == "documents" for item in self.spec.items):
            if documents is not None:
                raise UserError(f"document_ids: {self.spec} must have +documents")
            return None
        ids = self.ids
        if ids is not None and ids.dim() == 3:
            raise UserError("position_ids on several axes do not separate documents")
        if documents is not None:
            return documents
        if ids is None or self.past:  # generation continues a single document
            shape = embeddings.size(0), self.past + embeddings.size(1)
            return embeddings.new_zeros(shape, dtype=torch.long)
        # [B or 1, T]. The id before the first one is such that the first token does not jump.
        jumps = ids.diff(dim=1, prepend=ids[:, :1] - 1).ne(1)
        if padding is not None:
            is_token = ~padding
            is_first = is_token & is_token.cumsum(1).eq(1)  # padding may come before it
            jumps = jumps & is_token & ~is_first
        if self.cache is not None and bool(jumps.any()):
            raise UserError(
                "position_ids start again, so a row holds several documents, but a cache can hold "
                "only one: pass use_cache=False, or generate from each document"
            )
        return jumps.expand(embeddings.size(0), -1).cumsum(1)

    def _join_cached_ids(self, padding: Tensor | None) -> Tensor | None:
        """Join the caller's ids to those of the cached tokens; None if ids only count tokens."""
        ids = self.ids
        cached: Tensor | None = getattr(self.cache, _CACHED_IDS, None)
        if ids is None:
            if cached is not None:
                raise UserError(
                    "the tokens in the cache had position_ids: give those of the new ones"
                )
            return None
        past = self.past
        if cached is not None:
            before = cached[:, :past]  # the cache may have been cropped
        else:
            is_token = ids.new_ones(1, past + ids.size(1)) if padding is None else ~padding
            counted = _count_tokens(is_token)  # [B or 1, S]
            new_padding = None if padding is None else padding[:, past:]
            if self._only_count(ids, counted[:, past:], new_padding):
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
        """Check whether ids, perhaps on axes, equal the count ``(B or 1, T)``, except at padding.

        Raises:
            UserError: the ids count the tokens of several documents.
        """
        if not may_sync(ids.device):
            return False  # in a graph values cannot be read
        if self.past and reading_waits(ids.device):
            # Each step of decoding would wait for the device. Ids of the first pass were compared.
            return True
        if ids.dim() == 2 and padding is None and _is_packed(ids):
            raise UserError(
                f"position_ids start again, as in a packed batch: add +documents to "
                f"{self.spec}, so that attention stays inside each document"
            )
        differs = ids.ne(counted) if ids.dim() == 2 else ids.ne(counted[..., None]).any(-1)
        return not (differs if padding is None else differs & ~padding).any()

    def cache_ids(self, ids: Tensor, config: PretrainedConfig) -> None:
        """Store the ids of all tokens as an attribute of the cache, for later steps.

        If the model would make a cache, it is made here and added to the arguments.

        Args:
            ids: result of :meth:`read_ids`.
            config: configuration of the stack.
        """
        uses_cache = self.named.get("use_cache")
        if self.cache is None and (config.use_cache if uses_cache is None else uses_cache):
            if config.is_encoder_decoder:
                raise UserError("position_ids that do not count the tokens: pass use_cache=False")
            # The model's code would make this cache, but only after this method.
            name = next(name for name in _CACHES if name in self.names)
            self.named[name] = DynamicCache(config=config)
        if self.cache is not None:
            setattr(self.cache, _CACHED_IDS, ids)


def _count_tokens(is_token: Tensor) -> Tensor:
    """Number the tokens of each row from 0, ``(B, S)``; padding repeats the number before it."""
    return (is_token.cumsum(1) - 1).clamp(min=0)


def _is_packed(ids: Tensor) -> bool:
    """Check whether any row of ids, ``(B or 1, T)``, counts tokens and starts again from 0."""
    steps = ids.diff(dim=1)
    starts_again = (steps < 0).any(dim=1)
    counts_or_starts = (steps.eq(1) | ids[:, 1:].eq(0)).all(dim=1)
    return bool((starts_again & counts_or_starts).any())
