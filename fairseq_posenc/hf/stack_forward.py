"""Computes the positions of a stack of layers, at the beginning of its ``forward``.

If the model's own attention can serve all positions, it is used: they are only rotations, for which
it gets our cosines and sines, and vectors that are added to the stack's input. Otherwise our
attention function computes them from the state of the pass (:class:`PassState`), which the stack
passes to its layers. B batch, T new tokens, S all tokens, those in the cache first.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_posenc import assembly
from fairseq_posenc.derived import Derived
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Dynamic, LongRope
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import CACHE_ADVICE, UNCOUNTED, find_self_cache
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.hf.record import exchange_names
from fairseq_posenc.hf.settings import OUR_ATTENTION, PASS_STATE, POSITIONS
from fairseq_posenc.hf.stack_arguments import StackArguments
from fairseq_posenc.hf.stand_ins import begin_pass
from fairseq_posenc.identity import Identity, WeightSettings, format_directions, parse_directions
from fairseq_posenc.modules.input_checks import check_embeddings
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.positions import may_sync
from fairseq_posenc.shared import Shared, compute_shared
from fairseq_posenc.specs import Spec


class PassState(NamedTuple):
    """The position state of a forward pass, which a stack passes to its layers."""

    # By kind of layer, cosines and sines by which the model's code rotates, `(B or 1, T, width)`.
    cosines: dict[int, tuple[Tensor, Tensor]]
    shared: tuple[Shared, ...] | None = None  # None if the model's own attention is used
    need_weights: bool = False  # whether attention weights are requested
    num_layers: int = 0  # of the stack
    attention: str = ""  # the name of the stack's


class LayerPlan(NamedTuple):
    """How a layer gets its positions."""

    kind: int  # index of its encodings in `Spec.layer_kinds`, which equal layers share
    direction: str  # `both`; `lr`: keys up to the query (causal); `rl`: keys from the query on
    head_dim: int  # width of a head
    cosine_width: int  # of the cosines that the model's code takes; 0: it takes none
    is_rotated: bool  # whether the model's code rotates it, by our cosines
    is_gated: bool  # whether its scores decay by forget gates


class HFStackPositions(StackPositions):
    """The positions of a stack, which become a submodule of it named ``POSITIONS``.

    The base class sets ``spec``, ``dims`` (sizes), and two modules of encodings: ``input``, of one
    that adds vectors to embeddings, or None; and ``shared``, which layers share. The stack is only
    read; an unfit spec is refused. ``directions``, such as ``lr,rl``, are of the first layers.
    """

    def __init__(
        self, spec: Spec, stack: Stack, max_positions: int, directions: str, boundary_id: int | None
    ) -> None:
        # Scalings and buckets depend on the length in training, not on `max_positions`.
        length, width = read_trained_length(stack.config), max(stack.head_widths)
        embed_dim, num_heads, causal = stack.config.hidden_size, stack.num_heads, stack.causal
        super().__init__(spec, embed_dim, num_heads, max_positions, causal, width, length)
        # The stack itself is not stored: it contains this module, and PEFT copies this module.
        self.family = stack.family
        self.boundary_id = boundary_id  # of the token that ends a sentence; None: not known
        first, count = parse_directions(directions, "directions"), len(stack.attentions)
        if first and causal:
            raise UserError("directions are for encoders: a decoder sees no later tokens")
        if len(first) > count:
            raise UserError(f"directions names {len(first)} layers, but the encoder has {count}")
        self.directions = format_directions(first)
        all_directions = first + ["lr" if causal else "both"] * (count - len(first))
        self.layer_plans = _plan_layers(spec, self.dims, stack, all_directions)
        # Whether the model's code applies all rotations; and whether its own attention can serve
        # all positions: the others are then vectors that are added to the input.
        self.rotates_all = [x.is_rotated for x in self.layer_plans] == spec.list_rotated(count)
        others = {item.encoding.acts_on for item in spec.items} - {"input", "rotation"}
        has_terms = any(assembly.draft_terms(spec, self.dims, backend="auto"))
        is_plain = stack.attends_plainly and not (self.directions or others or has_terms)
        self.can_keep_attention = self.rotates_all and is_plain
        self.is_decoder = stack.is_decoder  # kept, as it takes time in each step of decoding
        self.parameter_names = [*inspect.signature(stack.module.forward).parameters]
        # The attention function that the model had before it got ours, and the backend of ours.
        self.stock_attention = stack.config._attn_implementation
        earlier: Any = getattr(stack.module, POSITIONS, None)  # if positions were set already
        if earlier is not None and self.stock_attention == OUR_ATTENTION:
            self.stock_attention = earlier.stock_attention
        self.backend = "flex" if self.stock_attention == "flex_attention" else "auto"
        if not self.can_keep_attention:  # refuses terms that the backend lacks
            assembly.draft_terms(spec, self.dims, self.backend)

    @property
    def identity(self) -> Identity:
        """What weights depend on: spec, length in training, causality if tables depend on it."""
        settings = WeightSettings()
        if any(item.encoding.rows_depend_on_causal for item in self.spec.items):
            settings = WeightSettings(attention="causal" if self.dims.causal else "bidirectional")
        return Identity(self.spec, self.directions, self.dims.trained_length, settings)

    def get_extra_state(self) -> Tensor:
        """Encode the identity, the record of these positions in state dicts."""
        return self.identity.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the record of a state dict with these positions; refuse others, set nothing."""
        if state.dim() != 1:  # a matrix: the weight of the stock model that has this name in files
            raise UserError("the weights are of a model whose positions were not set")
        theirs, ours = Identity.from_tensor(state), self.identity
        if differences := theirs.position_differences(ours):  # "trained with X, the model has Y"
            raise UserError(f"weights {differences[0]}: call set_positions, or restore config.json")
        if differences := theirs.weight_settings.differences(ours.weight_settings):
            raise UserError(f"weights {differences[0]}: keep is_causal and is_decoder as they were")

    def prepare(
        self, module: nn.Module, named: dict[str, Any]
    ) -> tuple[dict[str, Any], PassState, Tensor | None]:
        """Prepare a pass of the stack's module, ``forward(**named)``; refuse unclear positions.

        Return the arguments that ``forward`` gets in place of the caller's, the state for the
        layers, and the mark of the cache, ``caches.UNCOUNTED``.
        """
        if named.get("input_ids") is None and named.get("inputs_embeds") is None:
            return {}, PassState({}), None  # the model's code refuses such a call
        stack = Stack(self.family, module)
        arguments = StackArguments(named, self, stack)
        attention = stack.config._attn_implementation
        is_ours = attention == OUR_ATTENTION  # else the model's own
        self._check_attention(stack, arguments, attention)
        # Not in steps of decoding; but always with a static cache, whose length may be on a GPU.
        if isinstance(arguments.past, Tensor) or not arguments.past:
            _refuse_replaced_layers(stack)
        # FlashAttention keeps packed texts apart by ids; other layers of a hybrid do not read them.
        separates_by_ids = "flash" in attention and not stack.is_hybrid
        arguments.refuse_packed(separates_by_ids)
        changes = _list_changes(stack, arguments, separates_by_ids)
        self._fit_scalings(arguments)  # before any rotation is computed
        inputs, ids = arguments.inputs, arguments.ids
        if self.input is None and not is_ours:  # only the rotations of new tokens are needed
            if ids is None:  # they are counted, from those in the cache on
                ids = torch.arange(inputs.size(1), device=inputs.device)[None] + arguments.past
            cosines = self._make_cosines(module, self.shared.rotations(ids))
            return changes, PassState(cosines, attention=attention), None
        positions, is_uncounted = arguments.read_positions(self.shared, self.boundary_id)
        self._refuse_inner_padding(positions, "attention_mask")  # which distances would count
        states = compute_shared(self.shared, positions)  # one for each kind of layer
        _refuse_cut_cache(stack, arguments, states[0])
        if self.input is not None:
            vectors: Any = self.input.as_list()[0].embed(states[0].positions)  # equal for all kinds
            changes |= {"inputs_embeds": self._embed(stack, inputs, vectors), "input_ids": None}
        cosines = self._make_cosines(module, [x.rotation for x in states])
        requested = named.get("output_attentions")
        needs_weights = stack.config.output_attentions if requested is None else requested
        shared, count = states if is_ours else None, len(stack.layers)
        return changes, PassState(cosines, shared, needs_weights, count, attention), is_uncounted

    def _check_attention(self, stack: Stack, arguments: StackArguments, attention: str) -> None:
        """Refuse attention that leaves positions out, and caches and masks that do not fit it."""
        if attention != OUR_ATTENTION:
            if not self.can_keep_attention:
                raise UserError(
                    f"{type(stack.module).__name__}: its attention {attention!r} leaves its "
                    f"positions out: call its set_attn_implementation({OUR_ATTENTION!r})"
                )
            if any(getattr(x, "is_sliding", False) for x in getattr(arguments.cache, "layers", ())):
                raise UserError(f"the cache drops keys of a window: {CACHE_ADVICE}")
            if isinstance(arguments.mask, BlockMask) and attention != "flex_attention":
                raise UserError("a BlockMask needs attn_implementation='flex_attention'")
            return
        # Our attention function refuses other keys and masks itself.
        given = arguments.named.get("use_cache")
        use_cache = getattr(stack.config, "use_cache", False) if given is None else given
        count = len(getattr(stack.config, "layer_types", None) or ())  # 0: not in a list
        if use_cache and 0 < count < len(stack.layers):
            raise UserError(f"layers were added: caches have {count}, so pass use_cache=False")
        is_gated = any(layer.is_gated for layer in self.layer_plans)
        if is_gated and getattr(arguments.cache, "offloading", False):
            raise UserError(f"{self.spec}: offloaded caches lose forget gates: use another cache")
        if torch.jit.is_tracing():
            raise UserError("torch.jit.trace fixes the sizes of an input: use torch.export.export")
        causal = self.dims.causal
        is_causal = self.is_decoder and getattr(stack.config, "is_causal", True)
        # Some attention functions of transformers obey the argument.
        if is_causal != causal or arguments.named.get("is_causal") not in (None, causal):
            raise UserError(
                f"is_causal was {causal} when the positions were set: change it in the "
                "configuration, and set them again"
            )

    def _fit_scalings(self, arguments: StackArguments) -> None:
        """Compute the constants of rotations that depend on the length of the input.

        As in transformers, this length is the largest position of the batch plus 1, so what a text
        gets depends on the other texts, and it is read, also from a static cache.
        """
        for rope in self.shared.modules():
            if isinstance(rope, Rope) and isinstance(rope.scaling, (Dynamic, LongRope)):
                length, ids = int(arguments.past) + arguments.inputs.size(1), arguments.ids
                if ids is not None and may_sync(ids.device):
                    length = int(ids.max()) + 1
                rope.set_dims(rope.dims._replace(max_positions=length))

    def _embed(self, stack: Stack, inputs: Tensor, vectors: Tensor) -> Tensor:
        """Add vectors ``(B or 1, T, C)`` to the embeddings of the tokens, ``(B, T, C)``.

        An encoder's code multiplies only the embeddings that it looks up, a decoder's also those
        that it is called with, so they are divided for it.
        """
        is_looked_up = not inputs.is_floating_point()
        embeddings = stack.module.get_input_embeddings()(inputs) if is_looked_up else inputs
        scale = getattr(stack.module, self.family.scale, 1.0)
        check_embeddings("inputs_embeds", embeddings, self.dims.embed_dim)
        if is_looked_up or self.is_decoder:
            embeddings = embeddings * scale
        embeddings = embeddings + vectors.type_as(embeddings)
        return embeddings / scale if self.is_decoder else embeddings

    def _make_cosines(self, module: Any, rotations: list[Any]) -> dict[int, tuple[Tensor, Tensor]]:
        """Convert the rotations by kind of layer to cosines, where the model's code rotates."""
        dtype, form = module.get_input_embeddings().weight.dtype, self.family.cosines
        kinds = {layer.kind for layer in self.layer_plans if layer.is_rotated}
        return {kind: rotations[kind].cosines(form, dtype) for kind in kinds}


def _plan_layers(spec: Spec, dims: Dims, stack: Stack, directions: list[str]) -> list[LayerPlan]:
    """Plan the layers of a stack, which have these directions."""
    # What each kind of layer adds to the scores of a single token, without values.
    terms = assembly.draft_terms(spec, dims, backend="auto")
    # The rotation of each kind or None, without values; with gradients, to tell trained ones.
    with torch.device("meta"), torch.enable_grad():
        rotations = assembly.build_shared(spec, dims).rotations(torch.zeros(1, 1).long())
    plans = []
    for index, attention in enumerate(stack.attentions):
        kind, cosine_width = spec.layer_kind(index), stack.find_cosine_width(attention)
        rotation = rotations[kind]
        is_rotated = (
            isinstance(rotation, PairRotation)
            # Not a trained one: reentrant checkpointing frees its graph after each layer.
            and not rotation.phases.requires_grad
            and stack.family.applies_cosines(attention)
            and rotation.has_cosines(stack.family.cosines, cosine_width)
        )
        width, is_gated = stack.head_widths[index], terms[kind].has(Decay)
        plans.append(LayerPlan(kind, directions[index], width, cosine_width, is_rotated, is_gated))
    return plans


def _list_changes(stack: Stack, given: StackArguments, reads_ids: bool) -> dict[str, Tensor | None]:
    """List the arguments that the stock ``forward`` gets with other values than the caller's."""
    changes: dict[str, Tensor | None] = {}
    if "logits_to_keep" in given.named:
        # With the caller's value, Gemma 4's last layers would get fewer tokens than positions.
        changes["logits_to_keep"] = None
    # In a graph the values of ids cannot be read: they may then count several texts.
    packed = given.is_packed
    may_be_packed = packed is not None and (not may_sync(packed.device) or bool(packed))
    if given.ids is not None and not (reads_ids and may_be_packed):
        changes["position_ids"] = None  # else masks of transformers begin a document at each gap
    has_types = hasattr(getattr(stack.module, "embeddings", None), "token_type_ids")
    if has_types and given.named.get("token_type_ids") is None:
        # Else its code reads zeros from a buffer that is as long as its own table of positions.
        changes["token_type_ids"] = given.inputs.new_zeros(given.inputs.shape[:2], dtype=torch.long)
    return changes


def _refuse_cut_cache(stack: Stack, arguments: StackArguments, shared: Shared) -> None:
    """Refuse a copy of a cache, without our mark, that may have fewer keys than tokens."""
    if arguments.past and not hasattr(arguments.cache, UNCOUNTED) and stack.is_decoder_alone:
        needed = shared.needed_keys()
        if needed.first is None and needed.last == arguments.past:  # as many keys as a full window
            raise UserError(
                f"a cache of {arguments.past} keys that this model did not fill may lack those "
                "that a window drops: copy whole caches, by copy.deepcopy"
            )


def _refuse_replaced_layers(stack: Stack) -> None:
    """Refuse layers of other models, and weights that accelerate loads only in their forward."""
    parts: list[Any] = [getattr(x, POSITIONS, None) for x in (stack.module, *stack.attentions)]
    # A layer may have another index than before, as PEFT replicates layers; saving compares kinds.
    if any(getattr(part, "spec", None) != parts[0].spec for part in parts):
        raise UserError("a layer with other positions was put into this model: set them again")
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
        """Run in place of the stock ``forward``, which passes the state to its layers as well."""
        positions: Any = getattr(self, POSITIONS, None)  # HFStackPositions, or PEFT's copy of it
        if positions is None:
            raise UserError(f"a {type(self).__name__} was built without positions: set them")
        named = {**dict(zip(positions.parameter_names, args)), **named}
        changes, state, is_uncounted = positions.prepare(self, named)
        named |= changes
        cosines = state.cosines.get(0) if len(positions.spec.layer_kinds) == 1 else None
        with begin_pass(cosines or (None, None)):  # which `stand_ins.NoRotation` returns
            output = forward(self, **named, **{PASS_STATE: state})
        results = output if isinstance(output, tuple) else output.values()
        # By this mark a later pass refuses to count on from ids that a caller gave in this one.
        if (cache := find_self_cache([*named.values(), *results])) is not None:
            setattr(cache, UNCOUNTED, is_uncounted)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the weights; our record gets the name of a stock one (:func:`exchange_names`).

        ``ModelWithPositions`` undoes this in its own ``state_dict``; other models around it do not.
        """
        if (positions := getattr(self, POSITIONS, None)) is not None:
            Stack(positions.family, cast(PreTrainedModel, self)).refuse_other_layers(positions.spec)
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        exchange_names(state, type(self.config), saving=True)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], *args: Any) -> None:
        """Load weights, after giving the stock weight and our record their own names."""
        exchange_names(state_dict, type(self.config), saving=False)
        super()._load_from_state_dict(state_dict, *args)  # type: ignore[misc]
