"""Computes the positions of a stack of layers, at the beginning of its ``forward``.

A stack is *native* if the model's own attention can compute all positions: they are only rotations,
for which it gets our cosines and sines, and vectors that are added to the stack's input. Attention
and its caches are then the model's. In all other stacks, our attention function computes them from
the state of the pass (:class:`PassState`), which the stack passes to its layers.

Layers with the same encodings are of one *kind*, numbered as in ``Spec.layer_kinds``.
Shapes: B batch, T new tokens, S all tokens, those in the cache first.
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
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Dynamic, LongRope
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import CACHE_ADVICE, UNCOUNTED, find_self_cache
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.own_positions import ATTENTION_TYPES, read_trained_length
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

Cosines = tuple[Tensor, Tensor]  # cosines and sines, each `(B or 1, T, width)`


class PassState(NamedTuple):
    """The position state of a forward pass, which a stack passes to its layers."""

    cosines: dict[int, Cosines]  # by kind of layer, those by which the model's own code rotates
    shared: tuple[Shared, ...] | None = None  # None if the model's own attention is used
    need_weights: bool = False  # whether attention weights are requested
    num_layers: int = 0  # of the stack
    is_uncounted: Tensor | None = None  # the mark of the cache, `caches.UNCOUNTED`


class HFStackPositions(StackPositions):
    """The positions of a stack, which become a submodule of it named ``POSITIONS``.

    The base class sets ``spec``, ``dims`` (sizes), and two modules of encodings: ``input``, of one
    that adds vectors to embeddings, or None; and ``shared``, which layers share. The stack is only
    read; an unfit spec is refused. ``directions``, such as ``lr,rl``, are those of first layers.
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
        first = parse_directions(directions, "directions")  # of the first layers
        if first and stack.causal:
            raise UserError("directions are for encoders: a decoder sees no later tokens")
        count = len(stack.attentions)
        if len(first) > count:
            raise UserError(f"directions names {len(first)} layers, but the encoder has {count}")
        self.directions = format_directions(first)
        self.layer_directions = first + ["lr" if causal else "both"] * (count - len(first))
        self.is_decoder = stack.is_decoder  # kept, as it takes time in each step of decoding
        self.parameter_names = [*inspect.signature(stack.module.forward).parameters]
        # For each layer: the width of the cosines that its code takes; whether it rotates by ours.
        self.cosine_widths = [stack.find_cosine_width(x) for x in stack.attentions]
        self.is_rotated = self._find_rotated(stack)
        self.rotated_kinds = {spec.layer_kind(i) for i, x in enumerate(self.is_rotated) if x}
        model_rotates = self.is_rotated == spec.list_rotated(count)  # so ours rotates nothing
        # What each kind of layer adds to the scores of a single token, without values.
        terms_by_kind = assembly.draft_terms(spec, self.dims, backend="auto")
        acts_on = {item.encoding.acts_on for item in spec.items}
        is_plain = acts_on <= {"input", "rotation"} and not (self.directions or any(terms_by_kind))
        # Whether attention and caches are the model's own; False later if another stack needs ours.
        self.is_native = model_rotates and stack.attends_plainly and is_plain
        # The attention function that the model had before it got ours, and the backend of ours.
        self.stock_attention = stack.config._attn_implementation
        earlier: Any = getattr(stack.module, POSITIONS, None)  # if positions were set already
        if earlier is not None and self.stock_attention == OUR_ATTENTION:
            self.stock_attention = earlier.stock_attention
        self.backend = "flex" if self.stock_attention == "flex_attention" else "auto"
        if not self.is_native:  # else no backend of ours is used
            assembly.draft_terms(spec, self.dims, self.backend)  # only refuses terms that it lacks
        self.gated_kinds = {kind for kind, terms in enumerate(terms_by_kind) if terms.has(Decay)}
        projects = any(terms.rows("layer") is not None for terms in terms_by_kind)  # table rows
        self._refuse_layers_that_differ(stack, model_rotates, projects)

    def _find_rotated(self, stack: Stack) -> list[bool]:
        """Find for each layer whether its own code can rotate it, by our cosines."""
        # Each kind's rotation, without values; with gradients, else trained ones would seem fixed.
        with torch.device("meta"), torch.enable_grad():
            encodings = assembly.build_shared(self.spec, self.dims)
            rotations = encodings.rotations(torch.zeros(1, 1).long())  # None without a rotation
        by_layer = [rotations[self.spec.layer_kind(i)] for i in range(len(stack.attentions))]
        return [
            isinstance(rotation, PairRotation)
            # Not a trained one: reentrant checkpointing frees its graph after each layer.
            and not rotation.phases.requires_grad
            and self.family.applies_cosines(attention)
            and rotation.has_cosines(self.family.cosines, width)
            for rotation, attention, width in zip(by_layer, stack.attentions, self.cosine_widths)
        ]

    def _refuse_layers_that_differ(self, stack: Stack, model_rotates: bool, projects: bool) -> None:
        """Refuse positions that not all layers can have, as in Gemma 4, whose layers differ."""
        spec = self.spec
        keys: dict[str, int] = {}  # by type of layer, the kind of the last one with keys of its own
        for index, attention in enumerate(stack.attentions):
            layer_type, kind = getattr(attention, "layer_type", ""), spec.layer_kind(index)
            if not getattr(attention, "is_kv_shared_layer", False):
                keys[layer_type] = kind
            elif keys.get(layer_type) != kind or projects:
                raise UserError(
                    f"{spec}: layer {index} of this model has no keys of its own: it must have the "
                    "positions of the layer whose keys it reads, and can project no rows of a table"
                )
        heads = sorted({*(getattr(stack.config, "num_attention_heads_per_layer", None) or ())})
        if len(heads) > 1 and not self.is_native:  # native: the model's own code attends
            raise UserError(
                f"{spec}: layers of this model have different numbers of heads, "
                f"{' and '.join(map(str, heads))}: use rotations alone"
            )
        widths = sorted({*stack.head_widths})
        dims_by_width = [self.dims._replace(own_head_dim=x) for x in widths]
        counts = [assembly.count_parameters(spec, x, len(spec.layers)) for x in dims_by_width]
        if len(widths) > 1 and not (model_rotates and all(x == counts[0] for x in counts)):
            raise UserError(
                f"{spec}: heads of this model are {' and '.join(map(str, widths))} wide, by layer: "
                "use own, or encodings without rotations and tables of this width, such as alibi"
            )

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
            raise UserError(f"weights {differences[0]}: set their positions before loading")
        if differences := theirs.weight_settings.differences(ours.weight_settings):
            raise UserError(f"weights {differences[0]}: keep is_causal and is_decoder as they were")

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[dict[str, Any], PassState]:
        """Prepare a forward pass of the stack's module, ``forward(*args, **named)``.

        Return all arguments of this ``forward`` by name, and the state of the pass; refuse
        arguments that do not determine the positions.
        """
        named = {**dict(zip(self.parameter_names, args)), **named}
        if named.get("input_ids") is None and named.get("inputs_embeds") is None:
            return named, PassState({})  # the model's code refuses such a call
        stack = Stack(self.family, module)
        arguments = StackArguments(named, self, stack)
        self._check_attention(stack, arguments)
        # Not in steps of decoding; in those with a static cache too, whose number may be on a GPU.
        if isinstance(arguments.past, Tensor) or not arguments.past:
            _refuse_replaced_layers(stack)
        # FlashAttention keeps packed texts apart by ids; other layers of a hybrid do not read them.
        has_flash = self.is_native and "flash" in stack.config._attn_implementation
        separates_by_ids = has_flash and not stack.is_hybrid
        arguments.refuse_packed(separates_by_ids)
        changes = _list_changes(stack, arguments, separates_by_ids)
        self._fit_scalings(arguments)  # before any rotation is computed
        inputs, ids = arguments.inputs, arguments.ids
        if self.is_native and self.input is None:  # only the rotations of new tokens are needed
            if ids is None:  # they are counted, from those in the cache on
                ids = torch.arange(inputs.size(1), device=inputs.device)[None] + arguments.past
            cosines = self._make_cosines(module, self.shared.rotations(ids))
            return {**named, **changes}, PassState(cosines)
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
        ours = None if self.is_native else states  # what our attention function reads
        state = PassState(cosines, ours, needs_weights, len(stack.layers), is_uncounted)
        return {**named, **changes}, state

    def _check_attention(self, stack: Stack, arguments: StackArguments) -> None:
        """Refuse attention, masks and caches for which the positions were not set."""
        attention = stack.config._attn_implementation
        if (attention == OUR_ATTENTION) == self.is_native:  # native: the model's, otherwise ours
            right = self.stock_attention if self.is_native else OUR_ATTENTION
            raise UserError(
                f"the attention of this model was set to {attention!r}, which leaves its positions "
                f"out: model.set_attn_implementation({right!r})"
            )
        masks = arguments.named.get("attention_mask")
        types = getattr(stack.config, "layer_types", None) or ()
        if isinstance(masks, dict) and not (ATTENTION_TYPES & {*types}).issubset(masks):
            raise UserError(f"a type of layers has no mask: {CACHE_ADVICE}")
        if self.is_native:  # our attention function refuses keys and masks itself
            if any(getattr(x, "is_sliding", False) for x in getattr(arguments.cache, "layers", ())):
                raise UserError(f"the cache drops keys of a window: {CACHE_ADVICE}")
            if isinstance(arguments.mask, BlockMask) and attention != "flex_attention":
                raise UserError("a BlockMask needs attn_implementation='flex_attention'")
            return
        given = arguments.named.get("use_cache")
        use_cache = getattr(stack.config, "use_cache", False) if given is None else given
        if use_cache and 0 < len(types) < len(stack.layers):
            raise UserError(f"layers were added: caches have {len(types)}, so pass use_cache=False")
        if self.gated_kinds and getattr(arguments.cache, "offloading", False):
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

    def _make_cosines(self, module: Any, rotations: list[Any]) -> dict[int, Cosines]:
        """Convert the rotations by kind of layer to cosines, where the model's code rotates."""
        dtype, form = module.get_input_embeddings().weight.dtype, self.family.cosines
        return {kind: rotations[kind].cosines(form, dtype) for kind in self.rotated_kinds}


def _list_changes(stack: Stack, given: StackArguments, keeps_ids: bool) -> dict[str, Tensor | None]:
    """List the arguments that the stock ``forward`` gets with other values than the caller's."""
    named, inputs = given.named, given.inputs
    # With the caller's value, Gemma 4's last layers would get fewer tokens than positions.
    changes: dict[str, Tensor | None] = {}
    if "logits_to_keep" in named:
        changes["logits_to_keep"] = None
    if given.ids is not None and not (keeps_ids and given.may_be_packed()):
        changes["position_ids"] = None  # else masks of transformers begin a document at each gap
    has_types = hasattr(getattr(stack.module, "embeddings", None), "token_type_ids")
    if has_types and named.get("token_type_ids") is None:
        # Else its code reads zeros from a buffer that is as long as its own table of positions.
        changes["token_type_ids"] = inputs.new_zeros(inputs.shape[:2], dtype=torch.long)
    return changes


def _refuse_cut_cache(stack: Stack, arguments: StackArguments, shared: Shared) -> None:
    """Refuse a copy of a cache, without our mark, that may have fewer keys than tokens."""
    past, has_mark = arguments.past, hasattr(arguments.cache, UNCOUNTED)
    if past and not has_mark and stack.is_decoder_alone:
        needed = shared.needed_keys()
        if needed.first is None and needed.last == past:  # keys, by which the copy counts tokens
            raise UserError(
                f"a cache of {past} keys that this model did not fill may lack those that a "
                "window drops: copy whole caches, by copy.deepcopy"
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
        named, state = positions.prepare(self, args, named)
        cosines = state.cosines.get(0) if len(positions.spec.layer_kinds) == 1 else None
        with begin_pass(cosines or (None, None)):  # which `stand_ins.NoRotation` returns
            output = forward(self, **named, **{PASS_STATE: state})
        results = output if isinstance(output, tuple) else output.values()
        # By this mark a later pass refuses to count on from ids that a caller gave in this one.
        if (cache := find_self_cache([*named.values(), *results])) is not None:
            setattr(cache, UNCOUNTED, state.is_uncounted)
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
