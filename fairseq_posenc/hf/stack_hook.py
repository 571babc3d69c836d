"""Computes the positions of a stack of layers, in a hook before the stack's forward pass.

If positions are only rotations that the model's code applies, and vectors at the input, attention
stays *native*, the model's own. Else ours computes it, and gets the position state as an argument.
``named`` are the stack's arguments by name. B batch, T new tokens, S all tokens, cached ones first.
"""

import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import (
    ATTRIBUTE,
    NAME,
    STATE,
    Cosines,
    PassState,
    can_be_cosines,
    make_cosines,
)
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.holders import refuse_offloaded
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.hf.record import RecordedPositions
from fairseq_posenc.modules.stack_positions import StackPositions, join_ids, read_position_ids
from fairseq_posenc.positions import may_sync, syncs
from fairseq_posenc.registry import get

_CACHED_IDS = "fairseq_posenc_position_ids"  # attribute of a cache: its tokens' ids, `(B or 1, S)`
_CACHES = ("cache", "past_key_values")  # the keyword of transformers 5, and of 4


class HookedPositions(RecordedPositions, StackPositions):
    """The positions of a stack, which are passed to its layers.

    Args:
        spec: encodings, as in :class:`StackPositions`.
        stack: the stack of a model.
        max_positions: longest sequence.

    Attributes:
        is_rotated: for each layer, whether the model's code applies its rotation, by our cosines
            and sines.
        is_native: whether attention and its caches are the model's.
        stock: name of the attention function that the model had.
        backend: backend of attention that is not native: FlexAttention where the model had it.
    """

    def __init__(self, spec: str, stack: Stack, max_positions: int) -> None:
        dims = stack.dims(max_positions)
        super().__init__(
            spec, dims.embed_dim, dims.num_heads, max_positions, dims.causal, dims.head_dim
        )
        # Scalings and buckets keep the length of the training, however long the tables are.
        length = read_trained_length(stack.config)
        self.assembly = self.assembly.trained_at(length)
        for encodings in filter(None, (self.input, self.shared)):
            for encoding in encodings.as_list():
                encoding.trained_at(length)
        # Not the stack, of which this is a part; and PEFT trains a copy of this module.
        self.family = stack.family
        self.parameter_names = [*inspect.signature(stack.module.forward).parameters]
        rotary = stack.family.rotary
        self.width = stack.rotary_width(stack.module.get_submodule(rotary[0])) if rotary else 0
        self.can_rotate = [
            can_be_cosines(rotation, stack.family.cosines, self.width)
            for rotation in self._rotations(torch.zeros(1, 1, dtype=torch.long))
        ]
        self.is_rotated = [
            self.can_rotate[self.assembly.spec.layer_kind(index)]
            and stack.family.applies_cosines(attention)
            for index, attention in enumerate(stack.attentions)
        ]
        self.is_native = stack.attends_plainly and self._is_plain()
        before = getattr(stack.module, ATTRIBUTE, None)
        attention = stack.config._attn_implementation
        self.stock = attention if before is None or attention != NAME else before.stock
        self.backend = "flex" if self.stock == "flex_attention" else "auto"
        self.has_documents = any(item.name == "documents" for item in self.assembly.spec.items)

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Compute the state of a pass from the inputs of the stack.

        Raises:
            UserError: the inputs do not determine the positions.
        """
        stack = Stack(self.family, module)
        named = {**dict(zip(self.parameter_names, args)), **named}
        attention = stack.config._attn_implementation
        if self.is_native and attention == NAME:
            raise UserError(
                f"these positions leave attention to transformers: "
                f"model.set_attn_implementation({self.stock!r})"
            )
        if not self.is_native and attention != NAME:
            raise UserError(
                f"the attention of this model was set to {attention!r}, which leaves its "
                f"positions out: model.set_attn_implementation({NAME!r})"
            )
        ids = self._take_axes(named)
        if self.is_native:
            self._keep_together(named, ids)
        if self.is_native and self.input is None:
            ids = self._count_ids(named, ids) if any(self.is_rotated) else None
            if ids is not None:
                dtype = stack.module.dtype
                named[STATE] = PassState(
                    [self._make_cosines(rotation, dtype) for rotation in self._rotations(ids)],
                    recompute_cosines=partial(self._recompute_cosines, ids, dtype),
                )
            return (), named
        cache = self._find_cache(named)
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"{type(cache).__name__} has a fixed size, which works only with encodings that "
                "are rotations: leave out cache_implementation"
            )
        past = 0 if cache is None else int(cache.get_seq_length())
        if not past:
            refuse_offloaded(stack)
        embeddings = self._embed(stack, named)
        if embeddings is None:
            return (), named
        batch, tgt_len = embeddings.shape[:2]
        padding = self._read_padding(named, batch, past + tgt_len)
        ids, documents = self._read_ids(named, ids, padding, past, embeddings, stack.config)
        if ids is not None and ids.dim() == 3:
            ids = ids.permute(2, 0, 1)  # [axes, B or 1, S]
        scale = stack.inner_scale
        embeddings, shared = self(
            embeddings * scale, padding, past, position_ids=ids, document_ids=documents
        )
        if self.input is not None:
            named["inputs_embeds"], named["input_ids"] = embeddings / scale, None
        if self.family.table.startswith("embeddings.") and named.get("token_type_ids") is None:
            # BERT would look up its types of tokens by their positions.
            types = torch.zeros(batch, tgt_len, dtype=torch.long, device=embeddings.device)
            named["token_type_ids"] = types
        need_weights = named.get("output_attentions")
        dtype = stack.module.dtype
        places = shared.positions.queries(shared.positions.places)
        named[STATE] = PassState(
            [self._make_cosines(state.rotation, dtype) for state in shared.kinds or (shared,)],
            None if self.is_native else shared,
            stack.config.output_attentions if need_weights is None else need_weights,
            partial(self._recompute_cosines, places, dtype),
        )
        return (), named

    def _is_plain(self) -> bool:
        """Check whether attention is plain, but for rotations that the model's code applies."""
        assembly = self.assembly
        limits = assembly.limits()
        rotations = [
            any(get(item.name).acts_on == "rotation" for item in layer)
            for layer in assembly.spec.layers
        ]
        return (
            all(terms == Terms() for terms in assembly.compute_terms("auto"))
            and not (limits.limits or limits.documents)
            and not any(get(item.name).acts_on == "positions" for item in assembly.spec.items)
            and all(
                is_rotated or not rotations[index % len(rotations)]
                for index, is_rotated in enumerate(self.is_rotated)
            )
        )

    def _rotations(self, ids: Tensor) -> list[Rotation | None]:
        """Compute the rotation of each kind of layer at positions ``(B or 1, T)``."""
        return [self.shared.rotation(ids, kind) for kind in range(len(self.shared.kinds))]

    def _make_cosines(self, rotation: Rotation | None, dtype: torch.dtype) -> Cosines | None:
        """Convert the rotation of a kind of layers to the cosines of the model's code."""
        return make_cosines(rotation, self.family.cosines, self.width, dtype)

    def _recompute_cosines(self, ids: Tensor, dtype: torch.dtype, kind: int) -> Cosines | None:
        """Compute the cosines of a kind of layers again, at positions ``(B or 1, T)``."""
        return self._make_cosines(self.shared.rotation(ids, kind), dtype)

    def _take_axes(self, named: dict[str, Any]) -> Tensor | None:
        """Take the caller's position ids, ``(B or 1, T)`` or ``(B or 1, T, axes)``.

        Of several axes, the model's code gets the first, as it checks the shape but needs no ids.

        Raises:
            UserError: ids are on axes that the encodings do not have.
        """
        ids: Tensor | None = named.get("position_ids")
        if ids is None or ids.dim() != 3:
            return ids
        named["position_ids"] = ids[0]
        return read_position_ids(
            "position_ids", ids, self.assembly.spec, ids.size(1), (ids.size(2),)
        )

    def _keep_together(self, named: dict[str, Any], ids: Tensor | None) -> None:
        """Add a mask of ones if ids ``(B or 1, T, ...)`` have gaps.

        Without a mask, transformers begins a document wherever ids do not grow by one. That is
        right only for ids that count the tokens of several documents, which several axes never do.
        """
        x = self._find_input(named)
        if ids is None or x is None or named.get("attention_mask") is not None:
            return
        if not may_sync(ids.device) or not ids.diff(dim=1).ne(1).any():
            return
        if ids.dim() == 3 or not _is_packed(ids):
            src_len = self._count_cached(named) + x.size(1)
            named["attention_mask"] = ids.new_ones(x.size(0), src_len, dtype=torch.long)

    def _count_ids(self, named: dict[str, Any], ids: Tensor | None) -> Tensor | None:
        """Count the new tokens as transformers does, but without padding: ``(B or 1, T)``."""
        x = self._find_input(named)
        if ids is not None or x is None:
            return ids
        mask = named.get("attention_mask")
        tgt_len = x.size(1)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return (mask.ne(0).cumsum(1) - 1).clamp(min=0)[:, mask.size(1) - tgt_len :]
        return (torch.arange(tgt_len, device=x.device) + self._count_cached(named)).unsqueeze(0)

    def _find_input(self, named: dict[str, Any]) -> Tensor | None:
        """Find the new tokens, ``(B, T)``, or their embeddings, ``(B, T, C)``."""
        tokens: Tensor | None = named.get("input_ids")
        return named.get("inputs_embeds") if tokens is None else tokens

    def _count_cached(self, named: dict[str, Any]) -> Any:
        """Count the earlier tokens; in a graph, and with a static cache, this is a tensor."""
        cache = self._find_cache(named)
        return 0 if cache is None else cache.get_seq_length()

    def _find_cache(self, named: dict[str, Any]) -> Any:
        return next((named[name] for name in _CACHES if named.get(name) is not None), None)

    def _embed(self, stack: Stack, named: dict[str, Any]) -> Tensor | None:
        """Look up the embeddings of the tokens; only their shape if no vectors are added."""
        embeddings = named.get("inputs_embeds")
        ids = named.get("input_ids")
        if embeddings is not None or ids is None:
            return embeddings
        if self.input is not None:
            return stack.embed(ids)
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
        self,
        named: dict[str, Any],
        ids: Tensor | None,
        padding: Tensor | None,
        past: int,
        embeddings: Tensor,
        config: PretrainedConfig,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read position ids that do not just count the tokens, and the documents they separate.

        Returns:
            The position ids, ``(B or 1, S)`` or ``(B or 1, S, axes)``, or None, and the number of
            each token's document, ``(B, S)``, or None.
        """
        batch, tgt_len = embeddings.shape[:2]
        if ids is not None and (ids.size(0) not in (1, batch) or ids.size(1) != tgt_len):
            raise UserError(f"position_ids {tuple(ids.shape)} must be ({batch} or 1, {tgt_len})")
        documents = named.pop("document_ids", None)
        if self.has_documents:
            if ids is not None and ids.dim() == 3:
                raise UserError("position_ids on several axes do not separate documents")
            if documents is None:
                is_cached = self._find_cache(named) is not None
                documents = self._number_documents(ids, padding, past, embeddings, is_cached)
            return None, documents
        if documents is not None:
            raise UserError(f"document_ids: {self.assembly.spec} must have +documents")
        cache = self._find_cache(named)
        earlier: Tensor | None = getattr(cache, _CACHED_IDS, None)
        if ids is None:
            if earlier is not None:
                raise UserError(
                    "the tokens in the cache had position_ids: give those of the new ones"
                )
            return None, None
        tokens = torch.zeros(1, past + tgt_len, dtype=torch.bool, device=ids.device)
        counted = ((~(tokens if padding is None else padding)).cumsum(1) - 1).clamp(min=0)  # [B, S]
        if earlier is None and not self._differ(ids, counted, padding, past):
            return None, None
        before = counted[:, :past] if earlier is None else earlier[:, :past]
        rows = max(before.size(0), ids.size(0))
        if before.size(0) not in (1, rows) or ids.size(0) not in (1, rows):
            raise UserError(
                f"position_ids are of {ids.size(0)} rows, but those of the tokens in the cache of "
                f"{before.size(0)}"
            )
        ids = join_ids(before.expand(rows, *before.shape[1:]), ids.expand(rows, *ids.shape[1:]))
        if self.assembly.dims.causal:
            self._keep_ids(ids, named, cache, config)
        return ids, None

    def _differ(self, ids: Tensor, counted: Tensor, padding: Tensor | None, past: int) -> bool:
        """Check whether the ids of new tokens, ``(B or 1, T, ...)``, differ from their count.

        Raises:
            UserError: the ids count the tokens of several documents.
        """
        if not may_sync(ids.device):  # in a graph
            return True
        if past > 0 and syncs(ids.device):  # the first pass was checked
            return False
        has_axes = ids.dim() == 3
        counted = counted[:, past:]
        differs = ids.ne(counted[..., None]).any(-1) if has_axes else ids.ne(counted)
        if padding is not None:
            differs = differs & ~padding[:, past:]
        elif not has_axes and _is_packed(ids):
            raise UserError(
                f"position_ids start again, as in a packed batch: add +documents to "
                f"{self.assembly.spec}, so that attention stays inside each document"
            )
        return bool(differs.any())

    def _keep_ids(
        self, ids: Tensor, named: dict[str, Any], cache: Any, config: PretrainedConfig
    ) -> None:
        """Store the ids of all tokens with the cache of their keys, for later steps."""
        uses_cache = named.get("use_cache")
        if cache is None and (config.use_cache if uses_cache is None else uses_cache):
            if config.is_encoder_decoder:
                raise UserError("position_ids that do not count the tokens: pass use_cache=False")
            name = next(name for name in _CACHES if name in self.parameter_names)
            cache = named[name] = DynamicCache(config=config)
        if cache is not None:
            setattr(cache, _CACHED_IDS, ids)

    def _number_documents(
        self,
        ids: Tensor | None,
        padding: Tensor | None,
        past: int,
        embeddings: Tensor,
        is_cached: bool,
    ) -> Tensor:
        """Number the document of each token, ``(B, S)``: a new one where position ids jump.

        Raises:
            UserError: a cache would hold several documents, which later steps could not separate.
        """
        (batch, tgt_len), device = embeddings.shape[:2], embeddings.device
        if ids is None or past:  # generation continues a single document
            return torch.zeros(batch, past + tgt_len, dtype=torch.long, device=device)
        jumps = ids.diff(dim=1, prepend=ids[:, :1] - 1).ne(1)  # [B or 1, T]
        if padding is not None:
            jumps = jumps & ~padding & (~padding).cumsum(1).ne(1)
        if is_cached and bool(jumps.any()):
            raise UserError(
                "position_ids start again, so a row holds several documents, but a cache can hold "
                "only one: pass use_cache=False, or generate from each document"
            )
        return jumps.expand(batch, -1).cumsum(1)


def prepare_pass(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Compute the state of a pass, as a hook before a stack runs.

    The positions are those that the stack has now: PEFT may have put a trained copy there.
    """
    return cast(
        "tuple[tuple[Any, ...], dict[str, Any]]",
        getattr(module, ATTRIBUTE).prepare(module, args, named),
    )


def _is_packed(ids: Tensor) -> bool:
    """Check whether a row of ids, ``(B or 1, T)``, counts tokens and starts again from 0."""
    steps = ids.diff(dim=1)
    return bool(((steps < 0).any(1) & (steps.eq(1) | ids[:, 1:].eq(0)).all(1)).any())
