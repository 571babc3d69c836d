"""The positions of a stack of layers, computed in a hook before the stack's forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import NAME, STATE, PassState, is_cosines
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.identity import Identity
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import may_sync, syncs

CACHES = ("cache", "past_key_values")  # the keyword of transformers 5, and of 4


class HookedPositions(StackPositions):
    """The positions of a stack, which hand their result to its layers.

    Args:
        spec: encodings, as in :class:`StackPositions`.
        stack: of a model.
        max_positions: longest sequence.

    Attributes:
        rotates: for each kind of layer, whether the model's own code can apply its rotation.
    """

    def __init__(self, spec: str, stack: Stack, max_positions: int) -> None:
        dims = stack.dims(max_positions)
        super().__init__(
            spec, dims.embed_dim, dims.num_heads, max_positions, dims.causal, dims.head_dim
        )
        self._trained_at(read_trained_length(stack.config))
        self.stack_parts = StackParts(stack, [*inspect.signature(stack.module.forward).parameters])
        rotary = stack.family.rotary
        self.width = stack.rotary_width(stack.module.get_submodule(rotary[0])) if rotary else 0
        ids = torch.zeros(1, 1, dtype=torch.long)
        self.rotates = [
            is_cosines(self.shared.rotation(ids, kind), stack.family.cosines, self.width)
            for kind in range(len(self.shared.kinds))
        ]
        self.has_documents = any(item.name == "documents" for item in self.assembly.spec.items)

    def _trained_at(self, length: int) -> None:
        """Let scalings and buckets keep the length of the training, whatever the tables hold."""
        self.assembly = self.assembly.trained_at(length)
        for encodings in filter(None, (self.input, self.shared)):
            for encoding in encodings.as_list():
                encoding.trained_at(length)

    def get_extra_state(self) -> Tensor:
        """Say what the weights were trained with, for whoever loads them."""
        spec, dims = self.assembly.spec, self.assembly.dims
        return Identity(str(spec), "", dims.trained_length).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse weights that were trained with other positions.

        Raises:
            UserError: they were.
        """
        theirs, ours = (Identity.from_tensor(x) for x in (state, self.get_extra_state()))
        for difference in theirs.differences(ours):
            raise UserError(f"weights {difference}: set these positions before loading")

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Compute the state of a pass from the inputs of the stack, as a hook before it runs.

        Raises:
            UserError: inputs of which the positions are not known.
        """
        stack = self.stack_parts.stack
        named = {**dict(zip(self.stack_parts.parameters, args)), **named}
        if stack.config._attn_implementation != NAME:
            raise UserError(
                f"the attention of this model was set to {stack.config._attn_implementation!r}, "
                f"which leaves its positions out: model.set_attn_implementation({NAME!r})"
            )
        past = self._count_past(named)
        embeddings = self._embed(named)
        if embeddings is None:
            return (), named
        batch, tgt_len = embeddings.shape[:2]
        padding = self._read_padding(named, batch, past + tgt_len)
        ids, documents = self._read_ids(named, padding, past, embeddings)
        embeddings, shared = self(
            embeddings, padding, past, position_ids=ids, document_ids=documents
        )
        if self.input is not None:
            named["inputs_embeds"] = embeddings
            named["input_ids"] = None
        weights = named.get("output_attentions")
        named[STATE] = PassState(
            shared,
            self.shared,
            stack,
            stack.module.dtype,
            self.width,
            stack.config.output_attentions if weights is None else weights,
        )
        return (), named

    def _count_past(self, named: dict[str, Any]) -> int:
        """Count the earlier tokens, whose keys are in the cache."""
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if cache is None:
            return 0
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"{type(cache).__name__} has a fixed size, which works only with encodings that "
                "are rotations: leave out cache_implementation"
            )
        return int(cache.get_seq_length())

    def _embed(self, named: dict[str, Any]) -> Tensor | None:
        """Look up the embeddings of the tokens if vectors are added to them, else their shape."""
        embeddings, ids = named.get("inputs_embeds"), named.get("input_ids")
        if embeddings is not None or ids is None:
            return embeddings
        table = self.stack_parts.stack.module.get_input_embeddings()
        if self.input is not None:
            looked_up: Tensor = table(ids)
            return looked_up
        ids = ids.view(-1, ids.size(-1))
        return torch.empty(1, device=ids.device).expand(*ids.shape, self.assembly.dims.embed_dim)

    def _read_padding(self, named: dict[str, Any], batch: int, src_len: int) -> Tensor | None:
        """Read the padding, ``(B, S)``, from the mask: 1 for tokens, 0 for padding."""
        mask = named.get("attention_mask")
        if isinstance(mask, dict):  # one for each type of layer, made by `generate`
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

    def _read_ids(
        self, named: dict[str, Any], padding: Tensor | None, past: int, embeddings: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read position ids that differ from the count of tokens, and the documents they mean.

        Returns:
            position ids, ``(B or 1, T)``, and the number of each token's document, ``(B, S)``;
            each may be None.
        """
        batch, tgt_len = embeddings.shape[:2]
        ids, documents = named.get("position_ids"), named.pop("document_ids", None)
        if self.has_documents:
            return None, self._number_documents(ids, documents, past, batch, tgt_len, padding)
        if documents is not None:
            raise UserError(f"document_ids: {self.assembly.spec} must have +documents")
        decodes_unseen = past > 0 and syncs(embeddings.device)  # the first pass was checked
        if ids is None or decodes_unseen or not may_sync(embeddings.device):
            return None, None
        counted = torch.arange(past, past + tgt_len, device=ids.device).unsqueeze(0)  # [1, T]
        real = torch.ones_like(counted, dtype=torch.bool)
        if padding is not None:
            counted = (padding.eq(0).cumsum(1) - 1)[:, past:]  # [B, T]
            real = ~padding[:, past:]
        differs = ids.ne(counted) & real
        if not bool(differs.any()):
            return None, None
        if bool((ids.diff(dim=1) < 0).any()) and padding is None:
            raise UserError(
                f"position_ids start again, as in a packed batch: add +documents to "
                f"{self.assembly.spec}, so that attention stays inside each document"
            )
        if past:
            raise UserError(
                "position_ids that do not count the tokens work only without a cache: leave them "
                "out, or pass use_cache=False"
            )
        return ids, None

    def _number_documents(
        self,
        ids: Tensor | None,
        documents: Tensor | None,
        past: int,
        batch: int,
        tgt_len: int,
        padding: Tensor | None,
    ) -> Tensor:
        """Number the document of each token, ``(B, S)``: a new one where position ids jump."""
        device = self.stack_parts.stack.module.device
        if documents is not None:
            return documents
        if ids is None or past:  # generation goes on with a single document
            return torch.zeros(batch, past + tgt_len, dtype=torch.long, device=device)
        jumps = ids.diff(dim=1, prepend=ids[:, :1] - 1).ne(1)  # [B or 1, T]
        if padding is not None:
            jumps = jumps & ~padding
            first = (~padding).cumsum(1).eq(1)
            jumps = jumps & ~first
        return jumps.expand(batch, -1).cumsum(1)


class StackParts:
    """A stack that is no submodule of its positions, and the names of its forward's parameters.

    A plain object: as a module, the stack would be a part of its own part.
    """

    def __init__(self, stack: Stack, parameters: list[str]) -> None:
        self.stack, self.parameters = stack, parameters
