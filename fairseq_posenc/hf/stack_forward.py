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

from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Dynamic, LongRope
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import (
    OUR_ATTENTION,
    POSITION_STATE,
    POSITIONS,
    PassState,
    can_be_cosines,
    make_cosines,
)
from fairseq_posenc.hf.caches import Tokens
from fairseq_posenc.hf.derived import Derived, wrap_forward
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.hf.record import RecordedPositions
from fairseq_posenc.hf.stack_arguments import StackArguments
from fairseq_posenc.hf.stand_ins import begin_pass
from fairseq_posenc.identity import format_directions
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import may_sync
from fairseq_posenc.specs import Spec


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
        width: width of the model's cosines; 0 if it has none.
        stock: name of the attention function that the model had before it got ours.
        lost_weights: names of trained weights that earlier positions of the stack had.
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
            str(spec), dims.embed_dim, dims.num_heads, max_positions, dims.causal, dims.head_dim
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
        self.lost_weights: set[str] = set()
        self.parameter_names = [*inspect.signature(stack.module.forward).parameters]
        rotary = stack.family.rotary
        self.width = stack.rotary_width(stack.module.get_submodule(rotary[0])) if rotary else 0
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
    ) -> tuple[dict[str, Any], PassState]:
        """Prepare a forward pass.

        Returns:
            The arguments of the stock forward, all by name, and the state, which is one of them.

        Raises:
            UserError: the arguments do not determine the positions.
        """
        if torch.jit.is_tracing() and not self.is_native:
            raise UserError(
                "torch.jit.trace records the sizes of one input, on which these positions depend: "
                "take torch.export.export"
            )
        stack = Stack(self.family, module)
        self._check_attention(stack, named.get("is_causal"))
        arguments = StackArguments(
            self.parameter_names,
            args,
            named,
            self.assembly.spec,
            self.boundary_id,
            self.is_native,
            self.family.first_id(stack.config),
        )
        self._fit_scalings(arguments)
        state = PassState([])
        if self.is_native and stack.config._attn_implementation != "flex_attention":
            arguments.refuse_block_mask()
        if self.is_native:
            self._refuse_mixing(stack, arguments)
            arguments.add_mask_if_ids_jump()
        if self.input is not None or not self.is_native:
            state = self._compute_state(stack, arguments)
        elif self.width and (ids := arguments.ids_or_count()) is not None:
            state = self._make_state(stack, ids, self._rotations(ids))
        arguments.named[POSITION_STATE] = state
        return arguments.named, state

    def _fit_scalings(self, arguments: StackArguments) -> None:
        """Compute the rotations that depend on the length of the input, as transformers does.

        That is 1 more than the largest position of a batch, so its other rows change a text.
        """
        ropes = [part for part in self.shared.modules() if isinstance(part, Rope)]
        ropes = [part for part in ropes if isinstance(part.scaling, (Dynamic, LongRope))]
        if not ropes or arguments.inputs is None:
            return
        length = arguments.past + arguments.inputs.size(1)
        if arguments.ids is not None and may_sync(arguments.ids.device):
            length = int(arguments.ids.max()) + 1
        for rope in ropes:
            rope.dims = rope.dims._replace(max_positions=length)
            rope.compute_constants()

    def _check_attention(self, stack: Stack, is_causal: bool | None) -> None:
        """Refuse attention that differs from that for which the positions were set.

        Args:
            stack: the stack.
            is_causal: argument of the call, which some attention functions of transformers obey.
        """
        attention = stack.config._attn_implementation
        if self.is_native and attention == OUR_ATTENTION:
            raise UserError(
                f"these positions leave attention to transformers: "
                f"model.set_attn_implementation({self.stock!r})"
            )
        if not self.is_native and attention != OUR_ATTENTION:
            raise UserError(
                f"the attention of this model was set to {attention!r}, which leaves its "
                f"positions out: model.set_attn_implementation({OUR_ATTENTION!r})"
            )
        causal = self.assembly.dims.causal
        if not self.is_native and not (stack.causal is causal and is_causal in (None, causal)):
            raise UserError(
                f"is_causal was {causal} when the positions were set: change it in the "
                "configuration, and set them again"
            )

    def _refuse_mixing(self, stack: Stack, arguments: StackArguments) -> None:
        """Refuse packed texts that the model's own attention would mix.

        FlashAttention separates them. transformers' masks do it by position ids, without a cache:
        in all models with rotations, but not in every model with a table, such as OPT.
        """
        mask = arguments.named.get("attention_mask")
        is_flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
        attention = stack.config._attn_implementation
        if arguments.inputs is None or not is_flat or "flash" in attention:
            return
        is_able = stack.causal and bool(self.family.rotary)
        separates_ids = is_able and not arguments.uses_cache(stack.module)
        arguments.refuse_packed(mask, separates_ids)

    def _compute_state(self, stack: Stack, arguments: StackArguments) -> PassState:
        """Change the arguments: add vectors to the embeddings, and add the position state."""
        cache = arguments.cache
        if getattr(cache, "is_compileable", False):
            raise UserError(
                f"{type(cache).__name__} has a fixed size, which works only with encodings that "
                "are rotations: leave out cache_implementation"
            )
        past = arguments.past
        if not past:
            _refuse_offloaded(stack)
        named = arguments.named
        embeddings = self._embed_or_shape(stack, named)
        if embeddings is None:  # no tokens were passed, and the model's code will say so
            return PassState([])
        batch, tgt_len = embeddings.shape[:2]
        mask = arguments.read_mask(batch, past + tgt_len)
        place = 2 * len(self.is_rotated)  # in a cache; decay comes after the keys of all layers
        self_cache = getattr(cache, "self_attention_cache", cache)
        tokens = arguments.read_tokens(batch, mask, Tokens.load(self_cache, place, past))
        if any(x is not None for x in tokens) and stack.is_decoder:
            self_cache = arguments.need_cache(stack.module)
            if self_cache is not None:
                tokens.store(self_cache, place, batch)
        ids = tokens.ids
        if ids is not None and ids.dim() == 3:
            ids = ids.permute(2, 0, 1)  # [axes, B or 1, S], as `StackPositions` takes them
        scale = stack.scale_inside
        embeddings, pass_positions = self(
            embeddings * scale,
            None if mask is None else mask.eq(0),
            past,
            position_ids=ids,
            document_ids=tokens.documents,
            ends=tokens.ends,
        )
        # Vectors are added to multiplied embeddings. The stack will multiply by `scale` again.
        if self.input is not None:
            named["inputs_embeds"] = embeddings / scale
            named["input_ids"] = None
        if self.family.has_token_types and named.get("token_type_ids") is None:
            # Without types, the model's code would look them up by positions, as far as its own go.
            types = torch.zeros(batch, tgt_len, dtype=torch.long, device=embeddings.device)
            named["token_type_ids"] = types
        # `kinds` is empty if all layers are of one kind.
        rotations = [kind.rotation for kind in pass_positions.kinds or (pass_positions,)]
        state = self._make_state(stack, pass_positions.positions.query_places, rotations)
        if not self.is_native:
            weights = named.get("output_attentions")
            weights = stack.config.output_attentions if weights is None else weights
            state = state._replace(shared=pass_positions, need_weights=weights)
        return state

    def _is_plain(self) -> bool:
        """Check whether the spec needs plain attention, after rotations by the model's code."""
        assembly = self.assembly
        spec = assembly.spec
        limits = assembly.limits()
        has_rotation = [
            any(item.encoding.acts_on == "rotation" for item in layer) for layer in spec.layer_kinds
        ]
        return (
            all(terms == Terms() for terms in assembly.draft_terms(backend="auto"))
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

    def _embed_or_shape(self, stack: Stack, named: dict[str, Any]) -> Tensor | None:
        """Look up the embeddings of the tokens, ``(B, T, C)``; None if no tokens were passed.

        If no vectors are added to them, only their shape is needed, and the values mean nothing.
        """
        embeddings = named.get("inputs_embeds")
        ids = named.get("input_ids")
        if embeddings is not None or ids is None:
            return embeddings
        if self.input is not None:
            return stack.embed(ids)
        ids = ids.view(-1, ids.size(-1))
        return torch.empty(1, device=ids.device).expand(*ids.shape, self.assembly.dims.embed_dim)


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

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        wrap_forward(cls, _run_pass)


def _run_pass(
    forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Compute the state of a pass, and call the stock ``forward`` of the stack with it."""
    positions: Any = getattr(module, POSITIONS, None)  # PEFT may have replaced it by a copy
    if positions is None:
        raise UserError(f"a {type(module).__name__} was built without positions: set them")
    named, state = positions.prepare(module, args, named)
    with begin_pass(state.cosines):
        return forward(module, **named)
