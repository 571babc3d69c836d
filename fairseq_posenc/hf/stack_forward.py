"""Computes the positions of a stack of layers, at the beginning of its ``forward``.

A stack is *native* if the model's own attention can compute all positions: they are only rotations,
for which it gets our cosines and sines, and vectors that are added to the stack's input. Attention
and its caches are then the model's. In all other stacks, our attention function gets the position
state as an argument.

Layers with the same encodings are of one *kind*, numbered as in ``Spec.layer_kinds``.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig

from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Dynamic, LongRope
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import (
    OUR_ATTENTION,
    POSITION_STATE,
    PassState,
    can_be_cosines,
    make_cosines,
)
from fairseq_posenc.hf.caches import Tokens, find_self_cache
from fairseq_posenc.hf.derived import Derived
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.hf.record import RecordedPositions, exchange_names
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.hf.stack_arguments import StackArguments
from fairseq_posenc.hf.stand_ins import begin_pass
from fairseq_posenc.identity import format_directions
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import may_sync, reading_waits
from fairseq_posenc.specs import Spec

# Attribute of a cache: the largest position id plus 1, less the count of tokens. It is read once in
# a generation, as reading ids in each step would wait for a GPU.
_AHEAD = "fairseq_posenc_ids_ahead"


class HFStackPositions(RecordedPositions, StackPositions):
    """The positions of a stack, which become a submodule of it named ``POSITIONS``.

    Args:
        spec: encodings, as in :class:`StackPositions`.
        stack: the stack of a model.
        max_positions: length of the longest sequence.
        directions: for each layer ``lr``, ``rl`` or ``both``.
        boundary_id: token that ends a sentence, or a document of ``documents``; None if unknown.

    Attributes:
        directions: of an encoder's first layers, as in ``lr,rl``; the others are ``both``.
        is_rotated: for each layer, whether the model's code rotates, by our cosines and sines.
        is_native: whether attention and its caches are the model's.
        is_hybrid: whether some layers have no attention.
        cache_place: index of the additional layer of caches that has what callers say of tokens.
        width: width of the model's cosines; 0 if it has none.
        stock: name of the attention function that the model had before it got ours.
        backend: backend of our attention function: FlexAttention if the model had that.
    """

    def __init__(
        self,
        spec: Spec,
        stack: Stack,
        max_positions: int,
        directions: list[str],
        boundary_id: int | None,
    ) -> None:
        dims = stack.dims(max_positions)
        super().__init__(
            spec, dims.embed_dim, dims.num_heads, max_positions, dims.causal, dims.head_dim
        )
        # Scalings and buckets depend on the length of the training, not on `max_positions`.
        length = read_trained_length(stack.config)
        self.assembly = self.assembly.trained_at(length)
        for encodings in filter(None, (self.input, self.shared)):
            for encoding in encodings.as_list():
                encoding.trained_at(length)
        # The stack itself is not stored: it contains this module, and PEFT copies this module.
        self.family = stack.family
        self.boundary_id = boundary_id
        self.parameter_names = [*inspect.signature(stack.module.forward).parameters]
        self.width = stack.cosine_width
        self.is_hybrid = stack.is_hybrid
        self.cache_place = 2 * len(stack.layers)  # decay comes after the keys of all layers
        can_rotate = [  # for each kind of layer; any position shows the form of its rotation
            can_be_cosines(rotation, stack.family.cosines, self.width)
            for rotation in self._rotations(torch.zeros(1, 1, dtype=torch.long))
        ]
        self.is_rotated = [
            can_rotate[self.assembly.spec.layer_kind(index)]
            and stack.family.applies_cosines(attention)
            for index, attention in enumerate(stack.attentions)
        ]
        self.directions = "" if dims.causal else format_directions(directions)
        self.is_native = stack.attends_plainly and self._is_plain() and not self.directions
        before: Any = getattr(stack.module, POSITIONS, None)  # if positions were set already
        attention = stack.config._attn_implementation
        was_ours = before is not None and attention == OUR_ATTENTION
        self.stock = before.stock if was_ours else attention
        self.backend = "flex" if self.stock == "flex_attention" else "auto"

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[dict[str, Any], Tokens]:
        """Prepare a forward pass.

        Returns:
            The arguments of the stock ``forward``, all by name; ``POSITION_STATE`` is one of them.
            And what the cache must keep of all tokens.

        Raises:
            UserError: the arguments do not determine the positions.
        """
        stack = Stack(self.family, module)
        arguments = StackArguments(
            {**dict(zip(self.parameter_names, args)), **named},
            self.assembly.spec,
            self.boundary_id,
            self.family.first_id(stack.config),
        )
        self._check_attention(stack, arguments)
        if arguments.inputs is None:  # the model's code will say so
            return {**arguments.named, POSITION_STATE: PassState([])}, Tokens()
        self._fit_scalings(arguments, arguments.inputs.size(1))
        named = {**arguments.named, **self._hide_ids(stack, arguments)}
        if self.input is not None or not self.is_native:
            changes, tokens = self._compute_state(stack, arguments, arguments.inputs)
            return {**named, **changes}, tokens
        places = arguments.places
        state = self._make_state(stack, places, self._rotations(places))
        return {**named, POSITION_STATE: state}, Tokens()

    def _fit_scalings(self, arguments: StackArguments, tgt_len: int) -> None:
        """Compute the rotations that depend on the length of the input, as transformers does.

        That is 1 more than the largest position of a batch, so its other rows change a text.
        """
        ropes = [part for part in self.shared.modules() if isinstance(part, Rope)]
        ropes = [part for part in ropes if isinstance(part.scaling, (Dynamic, LongRope))]
        if not ropes:
            return
        past, ids, cache = arguments.past, arguments.ids, arguments.cache
        length = past + tgt_len
        if ids is not None and may_sync(ids.device):
            is_known = past and reading_waits(ids.device)
            ahead = getattr(cache, _AHEAD, None) if is_known else None
            if ahead is None:
                ahead = int(ids.max()) + 1 - length
                if cache is not None:
                    setattr(cache, _AHEAD, ahead)
            length += ahead
        for rope in ropes:
            rope.dims = rope.dims._replace(max_positions=length)
            rope.compute_constants()

    def _check_attention(self, stack: Stack, arguments: StackArguments) -> None:
        """Refuse attention that differs from that for which the positions were set."""
        attention = stack.config._attn_implementation
        if self.is_native is (attention == OUR_ATTENTION):
            right = self.stock if self.is_native else OUR_ATTENTION
            raise UserError(
                f"the attention of this model was set to {attention!r}, which leaves its positions "
                f"out: model.set_attn_implementation({right!r})"
            )
        if self.is_native:
            if isinstance(arguments.mask, BlockMask) and attention != "flex_attention":
                raise UserError(
                    "attention_mask: BlockMask needs attn_implementation='flex_attention'"
                )
            return
        if torch.jit.is_tracing():
            raise UserError(
                "torch.jit.trace records the sizes of one input, on which these positions depend: "
                "take torch.export.export"
            )
        causal = self.assembly.dims.causal
        # Some attention functions of transformers obey the argument.
        if stack.causal is not causal or arguments.named.get("is_causal") not in (None, causal):
            raise UserError(
                f"is_causal was {causal} when the positions were set: change it in the "
                "configuration, and set them again"
            )

    def _hide_ids(self, stack: Stack, arguments: StackArguments) -> dict[str, None]:
        """Hide ids from transformers' masks, which would begin a document at each gap of ids.

        FlashAttention gets ids that count the tokens of several documents, and separates these.

        Returns:
            The arguments that change.

        Raises:
            UserError: texts are packed, and attention would mix them.
        """
        mask = arguments.mask
        is_flash = self.is_native and "flash" in stack.config._attn_implementation
        if is_flash and not self.is_hybrid:
            packed = arguments.find_packed_ids()
            if packed is not None and (not may_sync(packed.device) or packed):
                return {}
        elif mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            arguments.refuse_packed()
        return {} if arguments.ids is None else {"position_ids": None}

    def _compute_state(
        self, stack: Stack, arguments: StackArguments, inputs: Tensor
    ) -> tuple[dict[str, Any], Tokens]:
        """Add vectors to the embeddings, and compute the position state.

        Returns:
            The arguments that change, and what the cache must keep of all tokens.
        """
        cache = arguments.cache
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"{type(cache).__name__} has a fixed size, which works only with encodings that "
                "are rotations: leave out cache_implementation"
            )
        past = arguments.past
        if not past:
            _refuse_offloaded(stack)
        mask = arguments.read_mask()
        tokens = arguments.read_tokens(mask, Tokens.load(cache, self.cache_place, past))
        ids = tokens.ids
        if ids is not None and ids.dim() == 3:
            ids = ids.permute(2, 0, 1)  # [axes, B or 1, S], as `StackPositions` takes them
        # A decoder multiplies all embeddings, an encoder only those that it looks up.
        scale = stack.scale if stack.is_decoder or not inputs.is_floating_point() else 1.0
        embeddings, pass_positions = self(
            self._embed_or_shape(stack, inputs) * scale,
            None if mask is None else mask.eq(0),
            past,
            position_ids=ids,
            document_ids=tokens.documents,
            ends=tokens.ends,
        )
        changes: dict[str, Any] = {}
        if self.input is not None:  # a decoder will multiply again
            embeddings = embeddings / scale if stack.is_decoder else embeddings
            changes |= {"inputs_embeds": embeddings, "input_ids": None}
        if self.family.has_token_types and arguments.named.get("token_type_ids") is None:
            # Without types, the model's code would look them up by positions, as far as its own go.
            types = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
            changes["token_type_ids"] = types
        # `kinds` is empty if all layers are of one kind.
        rotations = [kind.rotation for kind in pass_positions.kinds or (pass_positions,)]
        state = self._make_state(stack, pass_positions.positions.query_places, rotations)
        if not self.is_native:
            weights = arguments.named.get("output_attentions")
            weights = stack.config.output_attentions if weights is None else weights
            state = state._replace(shared=pass_positions, need_weights=weights)
        return {**changes, POSITION_STATE: state}, tokens

    def _is_plain(self) -> bool:
        """Check whether the spec needs plain attention, after rotations by the model's code."""
        assembly = self.assembly
        spec = assembly.spec
        limits = assembly.limits()
        has_rotation = [
            any(item.encoding.acts_on == "rotation" for item in layer) for layer in spec.layer_kinds
        ]
        return (
            not any(assembly.draft_terms(backend="auto"))
            and not (limits.limits or limits.documents)
            and not any(item.encoding.acts_on == "positions" for item in spec.items)
            and all(
                is_rotated or not has_rotation[spec.layer_kind(index)]
                for index, is_rotated in enumerate(self.is_rotated)
            )
        )

    def _rotations(self, ids: Tensor) -> list[Rotation | None]:
        """Compute the rotation of each kind of layer at positions ``(B or 1, T)``."""
        return [self.shared.rotation(ids, kind) for kind in range(len(self.shared.kinds))]

    def _make_state(self, stack: Stack, ids: Tensor, rotations: list[Rotation | None]) -> PassState:
        """Convert the rotation of each kind of layer to the cosines of the model's code.

        Args:
            stack: the stack.
            ids: positions of the new tokens, ``(B or 1, T)`` or ``(B or 1, T, axes)``.
            rotations: the rotations at these positions.
        """
        if not self.width:
            return PassState([])
        like = next(stack.module.parameters())
        convert = partial(make_cosines, form=self.family.cosines, width=self.width, like=like)
        if not any(self.is_rotated):
            return PassState([convert(None)])
        return PassState(
            [convert(rotation) for rotation in rotations],
            recompute_cosines=lambda kind: convert(self.shared.rotation(ids, kind)),
        )

    def _embed_or_shape(self, stack: Stack, inputs: Tensor) -> Tensor:
        """Look up the embeddings of the tokens, ``(B, T, C)``, unless they are embeddings already.

        If no vectors are added to them, only their shape is needed, and the values mean nothing.
        """
        if inputs.is_floating_point():
            return inputs
        if self.input is not None:
            embeddings: Tensor = stack.module.get_input_embeddings()(inputs)
            return embeddings
        return torch.empty(1, device=inputs.device).expand(
            *inputs.shape, self.assembly.dims.embed_dim
        )


def _refuse_offloaded(stack: Stack) -> None:
    """Refuse offloaded weights: accelerate loads them only when their module's forward runs."""
    parts = [getattr(module, POSITIONS) for module in (stack.module, *stack.attentions)]
    if any(weight.is_meta for part in parts for weight in part.parameters()):
        raise UserError(
            "accelerate has offloaded trained positions: leave the modules named positions, and "
            "the layers that have them, on a device (device_map)"
        )


class StackWithPositions(Derived):
    """Mixin of a stack: its ``forward`` computes the positions of a pass first."""

    config: PretrainedConfig

    def run_forward(
        self, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Compute the state of a pass, and call the stock ``forward`` of the stack with it."""
        positions: Any = getattr(self, POSITIONS, None)  # PEFT may have replaced it by a copy
        if positions is None:
            raise UserError(f"a {type(self).__name__} was built without positions: set them")
        named, tokens = positions.prepare(self, args, named)
        with begin_pass(named[POSITION_STATE].cosines):
            output = forward(self, **named)
        if tokens.is_known:
            results = output if isinstance(output, tuple) else output.values()
            cache = find_self_cache([*named.values(), *results])
            if cache is not None:
                tokens.store(cache, positions.cache_place, output[0].size(0))
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the weights with a guard, which a saved model around this stack does not undo."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        exchange_names(state, type(self.config), saving=True)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], *args: Any) -> None:
        exchange_names(state_dict, type(self.config), saving=False)
        super()._load_from_state_dict(state_dict, *args)  # type: ignore[misc]
