"""Reads the arguments with which a transformers model calls a stack of layers.

By default tokens are counted from 0, without padding. Other ids, or documents, that a caller gives
are used in that pass alone: a cache does not keep them, and a pass that continues it is refused.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import SharedEncodings
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import CACHE_ADVICE, UNCOUNTED, find_self_cache
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import ATTENTION_TYPES
from fairseq_posenc.modules.input_checks import read_position_ids
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import Positions, counts_several, find_documents, may_sync, refuse_if

_NO_DOCUMENTS = "position_ids on several axes do not separate documents"


class StackArguments:
    """The arguments of a forward pass of a stack.

    Args:
        named: all arguments of the stack's ``forward``, by name; tokens or embeddings among them.
        positions: positions of the stack.
        stack: the stack's module in the model, with its family.

    Raises:
        UserError: position ids have another shape, or are on axes that the encodings do not have;
            or ``document_ids`` are given, which only the library's own modules take.
    """

    def __init__(self, named: dict[str, Any], positions: StackPositions, stack: Stack) -> None:
        if "document_ids" in named:
            raise UserError("document_ids: pass position_ids that begin at 0 in each document")
        self.named, self.spec = named, positions.spec
        self.has_documents = "documents" in self.spec.names
        name = "inputs_embeds" if named.get("input_ids") is None else "input_ids"
        self.inputs: Tensor = named[name]  # (B, T), or embeddings (B, T, C)
        shape = tuple(self.inputs.shape)
        if len(shape) != (2 if name == "input_ids" else 3) or not shape[1]:
            raise UserError(f"{name} {shape} must be a batch of texts that have tokens")
        mask = named.get("attention_mask")
        # `generate` makes a mask for each type of layer: our `make_mask` (attention.py) returns the
        # padding for all. Stock masks, of a model around this one, are None if they hide nothing.
        masks = mask.values() if isinstance(mask, dict) else [mask]
        types = ATTENTION_TYPES & {*(getattr(stack.config, "layer_types", None) or ())}
        if isinstance(mask, dict) and not types.issubset(mask):
            raise UserError(f"a type of layers has no mask: {CACHE_ADVICE}")
        self.mask: Any = next((x for x in masks if x is not None), None)  # of any form
        if isinstance(self.mask, Tensor):
            self.mask = self.mask.to(self.inputs.device)
        has_rows = isinstance(self.mask, Tensor) and self.mask.dim() == 2  # (B, S), of padding
        self.real: Tensor | None = self.mask.ne(0) if has_rows else None  # padding is False
        self.may_mix = has_rows or self.mask is None  # other masks may keep texts apart themselves
        self.cache: Any = find_self_cache(named.values())
        given = named.get("past_key_values", named.get("cache"))
        if given is not None and self.cache is None:  # its tokens would not be counted
            raise UserError(f"past_key_values is a {type(given).__name__}, not transformers' Cache")
        # The number of tokens in the cache; in a static one a tensor, so that a graph serves all.
        self.past: Any = 0 if self.cache is None else self.cache.get_seq_length()
        # The caller's ids, (B or 1, T) or (B or 1, T, axes), or None; and those on one axis alone.
        self.ids, text_ids = self._read_ids(positions, stack)
        # Whether ids count several texts, a bool (); None where they cannot show it. A static cache
        # counts its tokens in a tensor, which is not read here.
        self.is_packed: Tensor | None = None
        is_first_pass = not isinstance(self.past, Tensor) and not self.past
        if text_ids is not None and self.mask is None and is_first_pass:
            self.is_packed = counts_several(text_ids)

    def _read_ids(
        self, positions: StackPositions, stack: Stack
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read the ids for the encodings, and those of the text on one axis; both may be None.

        M-RoPE's come as ``(axes or 1 + axes, B, T)``, in the longer form with the text's first, and
        become ``(B, T, axes)``. A spec without an encoding on these axes reads the text's, or none.
        """
        ids, text_ids = self.named.get("position_ids"), None
        axes = len(stack.family.sections)  # 0 in families without M-RoPE
        readers = positions.id_readers  # encodings that read ids, by their text in the spec
        if axes and isinstance(ids, Tensor) and ids.dim() == 3 and len(ids) in (axes, 1 + axes):
            if len(ids) > axes:
                text_ids, ids = ids[0], ids[1:]
            if axes not in [reader.axes for reader in readers.values()]:  # none reads these axes
                if text_ids is None and self.may_mix:
                    self._refuse_restarts(ids[0])  # of time: others also decrease within a text
                ids = text_ids
        if ids is not None:
            batch, tgt_len = self.inputs.shape[:2]
            ids = read_position_ids("position_ids", ids, readers, batch, (tgt_len,))  # axes last
        if first_id := stack.family.first_id(stack.config):  # of the first token, if it is not 0
            ids = self._convert_ids(ids, first_id, positions.dims.causal)
        if ids is not None and ids.dim() == 2:
            text_ids = ids
        return ids, text_ids

    def _refuse_restarts(self, ids: Tensor) -> None:
        """Refuse ids on an axis, ``(B, T)``, that decrease, as they do only where a text begins."""
        begins = ids.diff(dim=-1).lt(0)
        if self.real is not None and self.real.size(1) >= ids.size(-1):  # else refused as too short
            real = self.real[:, -ids.size(-1) :]
            begins = begins & real[:, 1:] & real[:, :-1]  # ids of padding mean nothing
        refuse_if(begins.any(), _NO_DOCUMENTS)  # in a graph or on a GPU, torch raises later

    def _convert_ids(self, ids: Tensor | None, first_id: int, causal: bool) -> Tensor | None:
        """Convert the caller's ids, which count from ``first_id``, the padding symbol's id + 1."""
        syncs = may_sync(self.inputs.device)  # no graph: values can be read, with a wait on a GPU
        if ids is None:
            # The stock class would find the padding by its symbol; here, it would be counted.
            lacks_mask = self.inputs.dim() == 2 and self.mask is None
            if lacks_mask and syncs and self.inputs.eq(first_id - 1).any():
                raise UserError("input_ids have padding: pass attention_mask")
        if ids is None or ids.dim() == 3:
            return ids
        tgt_len = ids.size(1)
        # Which ids count real tokens from 0, (B, T). A mask that is too short is refused later.
        if self.real is None or self.real.size(1) < tgt_len:
            is_counted = ids.eq(torch.arange(tgt_len, device=ids.device) + self.past)
        else:
            is_counted = ids.eq(self.real.cumsum(1)[:, -tgt_len:] - 1) | ~self.real[:, -tgt_len:]
        # `generate` counts from 0 in all models, and calls no encoder with ids.
        from_zero = is_counted.all() & causal
        if syncs and not from_zero and (ids < first_id - 1).any():  # padding has `first_id - 1`
            raise UserError(f"position_ids of this model count from {first_id}, as its class does")
        return torch.where(from_zero, ids, ids - first_id).clamp(min=0)

    def refuse_packed(self, separates_by_ids: bool) -> None:
        """Refuse several documents in a row, unless the spec, attention or a mask separates them.

        With ``separates_by_ids``, attention does so by the caller's ids, as FlashAttention does.
        """
        if self.has_documents or not self.may_mix:
            return
        signs = [] if self.mask is None else [self.mask.gt(1).any()]  # a mask that counts documents
        if not separates_by_ids:
            signs += [numbers.diff(dim=1).any() for numbers in self._list_numbers()]
            if self.is_packed is not None:
                signs.append(self.is_packed)
        for is_packed in signs:
            refuse_if(
                is_packed,
                "a row holds several documents, as in a packed batch: add +documents to "
                f"{self.spec}, so that attention stays inside each document",
            )

    def _list_numbers(self) -> list[Tensor]:
        """List the numbers of new tokens' documents, ``(B or 1, T)``, for each argument given."""
        numbers, shape = self.named.get("seq_idx"), tuple(self.inputs.shape[:2])  # (B, T)
        if numbers is not None and numbers.shape not in (shape, (1, shape[1])):
            raise UserError(f"seq_idx {tuple(numbers.shape)} must be {shape} or one row")
        listed = [] if numbers is None else [numbers]
        if (offsets := self.named.get("cu_seq_lens_q")) is not None:  # 0, then each text's end
            indices = torch.arange(shape[0] * shape[1], device=offsets.device, dtype=offsets.dtype)
            refuse_if(offsets[-1].ne(len(indices)), "cu_seq_lens_q must count padding, too")
            listed.append(torch.bucketize(indices, offsets, right=True).view(shape))
        return listed

    def _read_mask(self) -> Tensor:
        """Read the mask ``(B, S)``, 0 for padding, else 1 or a document's number; refuse others."""
        mask = self.mask
        shape = (self.inputs.size(0), self.past + self.inputs.size(1))
        if mask is None:
            return torch.ones(shape, dtype=torch.long, device=self.inputs.device)
        if not isinstance(mask, Tensor) or mask.shape != shape:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            advice = f" ({CACHE_ADVICE})" if isinstance(self.named["attention_mask"], dict) else ""
            raise UserError(
                f"attention_mask {found} must be {shape}, 1 for tokens and 0 for padding, also "
                "for those in the cache; windows and documents belong to the spec" + advice
            )
        return mask

    def read_positions(
        self, encodings: SharedEncodings, boundary_id: int | None
    ) -> tuple[Positions, Tensor | None]:
        """Number all tokens by what the caller says of them; not called for rotations alone.

        Args:
            encodings: those that layers share, which may count in sentences or documents.
            boundary_id: token that ends a sentence, or a document; None if that is not known.

        Returns:
            The positions; and a bool tensor ``()``, whether counting the tokens of the mask gives
            other positions; None if no ids or documents were given, nor in earlier passes.

        Raises:
            UserError: the arguments do not fit the spec, the cache has a fixed size, or its tokens
                have positions that counting does not give.
        """
        if getattr(self.cache, "is_compileable", False):  # transformers' static caches
            raise UserError(
                f"{type(self.cache).__name__} has a fixed size: set rotations of the stock layout "
                "and width alone (Llama: rope(layout=half)), or leave out cache_implementation"
            )
        past, mask = self.past, self._read_mask()
        if boundary_id is not None and (self.inputs.dim() == 3 or past):
            raise UserError("boundary_id is found in input_ids: pass them all, use_cache=False")
        positions = Positions.from_padding(mask.eq(0), tgt_len=self.inputs.size(1))
        differs: list[Tensor] = []  # bools `()`, one for each cause of other positions
        if past and (earlier := getattr(self.cache, UNCOUNTED, None)) is not None:
            differs.append(earlier)  # with which an earlier pass marked its cache
        if self.has_documents and boundary_id is None:  # else the ends below show them
            if self.ids is not None and self.ids.dim() == 3:
                raise UserError(_NO_DOCUMENTS)
            # Ids after a cache begin no document: below, they must count on from those in it.
            begins = find_documents(mask.long(), self._list_numbers(), None if past else self.ids)
            positions = positions.begin_documents(begins)  # (B, S), where one of these begins
            differs.append(begins.any())
        ids = self.ids
        if ids is not None:
            by_axis = ids if ids.dim() == 3 else ids[..., None]
            is_other = by_axis.ne(positions.ids[:, past:, None]).any(-1) & mask[:, past:].ne(0)
            differs.append(is_other.any())
            # Ids that equal the counted ones are dropped. After a cache, all others are refused
            # below. In a graph values cannot be read: there, a first pass keeps its ids.
            if past or (may_sync(ids.device) and not differs[-1]):
                ids = None
        is_uncounted = torch.stack(differs).any() if differs else None
        if past and is_uncounted is not None:
            refuse_if(
                is_uncounted,
                "position_ids or documents do not count on from the tokens in a cache: pass all "
                "tokens at once, without one (use_cache=False)",
            )
        if boundary_id is not None:
            ends = self.inputs.eq(boundary_id) & mask.ne(0)  # of sentences or documents, (B, S)
            positions = encodings.number(positions._replace(ends=ends))  # counts in each document
        if ids is not None:  # last, as they replace what was counted
            positions = positions.replace_ids(ids)
        return positions, is_uncounted
