"""Computes attention with our positions, as a function of transformers' attention interface.

transformers calls it with projected queries and keys, and with the position state that the stack
computed (:class:`PassState`). The function is registered when this module is imported.

If the model's own code rotates, the cache has rotated keys; if ours does, the cache has keys before
their rotation. Layers with the same encodings are of one *kind*; kinds are numbered as in
``Spec.layer_kinds``. B batch, T new of S tokens, H heads (G of keys), D head size, C model size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fairseq_posenc.assembly import build_layer
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.rotation import PairRotation, Rotation
from fairseq_posenc.encodings.term import ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.caches import DecayCache, find_rows, find_self_cache
from fairseq_posenc.hf.derived import CALLED_BY_ITSELF, Cosines, Derived
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.stack_positions import StackPositions
from fairseq_posenc.shared import Shared

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
OUR_ATTENTION = "fairseq_posenc"  # name of the attention function in transformers
POSITION_STATE = "position_state"  # keyword argument of all layers: a `PassState`
# Attribute of other attention in a model with positions, such as that to an encoder's output.
WITHOUT_POSITIONS = "attends_without_positions"
# What to do about caches, or masks by types of layers, that were made for other windows.
MAKE_CACHES = (
    "make caches after set_positions, as DynamicCache(config=model.config); in a model around this "
    "one, let its config.text_config be this one's config"
)


class PassState(NamedTuple):
    """The position state of a forward pass, which a stack passes to its layers.

    Attributes:
        cosines: for each kind of layer the cosines and sines by which the model's own code rotates,
            or None.
        plain: by width of cosines, those that rotate by nothing.
        shared: position state of the stack; None if the model's own attention is used.
        need_weights: whether attention weights are requested.
        is_uncounted: whether counting the tokens gives other positions, a bool ``()``, or None.
        inputs: input of the layer, ``(B, T, C)``; each layer sets it, and ``cache``, in a copy.
        cache: cache of the keys, or None.
    """

    cosines: list[Cosines | None]
    plain: dict[int, Cosines]
    shared: tuple[Shared, ...] | None = None
    need_weights: bool = False
    is_uncounted: Tensor | None = None
    inputs: Tensor | None = None
    cache: Cache | None = None


def make_cosines(rotation: PairRotation, form: str, like: Tensor) -> Cosines:
    """Convert a rotation to a model's cosines and sines, each ``(B or 1, T, width)``.

    Args:
        rotation: rotation of the last T tokens.
        form: ``half``: as they are; ``pairs``: each of them twice; ``doubled...``: all, and again.
        like: a tensor of the dtype of the result.
    """
    # The parts are taken first, as ONNX cannot select from complex numbers.
    phases = rotation.phases
    parts = [part[:, 0].to(like.dtype) for part in (phases.real, phases.imag)]  # [B or 1, T, pairs]
    if form.startswith("doubled"):
        parts = [torch.cat([part, part], -1) for part in parts]
    elif form == "pairs":
        parts = [part.repeat_interleave(2, -1) for part in parts]
    return parts[0], parts[1]


def applies_rotation(stack: Stack, attention: nn.Module, rotation: Rotation | None) -> bool:
    """Check whether a model's own attention can apply a rotation: see :func:`make_cosines`.

    A trained one it cannot: the backward pass of the first layer would free its autograd graph,
    which others need where they are checkpointed.
    """
    if not isinstance(rotation, PairRotation) or rotation.decay is not None or rotation.is_trained:
        return False
    form, width = stack.family.cosines, stack.find_cosine_width(attention)
    pairs_halves = "pairs" not in form  # a head's first half with its second, not adjacent ones
    pairs = width if form == "half" else width // 2
    fits = rotation.half == pairs_halves and rotation.phases.size(-1) == pairs
    return fits and stack.family.applies_cosines(attention)


class AttentionPositions(AttentionCore, nn.Module):
    """The positions of a layer's self-attention: its trained encodings, and how they are applied.

    Args:
        positions: the stack's, which are not kept.
        index: number of the layer.
        stack: the stack of the model, which is not kept.
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
        is_rotated: whether the model's own code applies the rotation, with our cosines and sines.
        decay_place: index of the cache layer for the decay of forget gates; None without gates.
        backend: backend that computes attention, or ``auto``.
    """

    def __init__(
        self,
        positions: StackPositions,
        index: int,
        stack: Stack,
        direction: str,
        is_rotated: bool,
        decay_place: int | None,
        backend: str,
    ) -> None:
        super().__init__()
        attention: Any = stack.attentions[index]
        head_dim = getattr(attention, "head_dim", positions.dims.head_dim)
        self.dims = positions.dims._replace(own_head_dim=head_dim)
        self.num_heads, self.head_dim = self.dims.num_heads, self.dims.head_dim
        self.cosine_width = stack.find_cosine_width(attention)
        self.encodings = build_layer(positions.spec, positions.dims, index)
        self.kind = positions.spec.layer_kind(index)
        self.family = stack.family
        self.direction = direction
        self.is_rotated = is_rotated
        self.decay_place = decay_place
        self.backend = backend

    def prepare(
        self, state: PassState, args: tuple[Any, ...], named: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the named arguments of the model's attention, with what positions add to them."""
        if width := self.cosine_width:
            cosines = state.cosines[self.kind] if self.is_rotated else state.plain[width]
            named = {**named, "position_embeddings": cosines}
        if state.shared is None:  # the model's own attention is used, which knows no state
            return named
        inputs = args[0] if args else named.get("hidden_states")  # [B, T, C]
        cache = find_self_cache([*named.values(), *args])
        return {**named, POSITION_STATE: state._replace(inputs=inputs, cache=cache)}

    def forward(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        """Attend with this layer's encodings; the arguments are those of :meth:`prepare_call`.

        Returns:
            The result, ``(B, T, H, D)``, and the weights ``(B, H, T, S)``, None unless requested.
        """
        attended, weights = attend(*self.prepare_call(*args), requested=self.backend)
        return attended.transpose(1, 2).contiguous(), weights

    def prepare_call(
        self,
        attention: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: PassState,
        scale_factor: float,
        dropout: float = 0.0,
    ) -> AttentionCall:
        """Build the call of a backend.

        Args:
            attention: the model's attention module.
            query: queries of the new tokens, ``(B, H, T, D)``.
            key: keys in the cache and of the new tokens, ``(B, G, S, D)``; already rotated if the
                model's own code does so.
            value: values of the same tokens, ``(B, G, S, D)``.
            state: state of the forward pass, with the input of the layer.
            scale_factor: that of the model, whose scores are divided by the root of it times D.
            dropout: probability of dropping a weight.

        Raises:
            UserError: the cache has more keys than there are tokens, or too few.
        """
        assert state.shared is not None, "else the model's own attention is used"
        if query.size(1) != self.num_heads:
            raise UserError(
                f"tensor parallelism gave this process {query.size(1)} of {self.num_heads} heads, "
                "and positions are computed for all of them: take tp_plan only with encodings that "
                "are rotations, else device_map or FSDP"
            )
        shared = state.shared[self.kind]
        self._check_cache(shared, key.size(2))
        positions = shared.positions
        earlier = positions.src_len - query.size(2)
        terms = self.collect_terms(shared)  # those of the layer and its stack
        if terms.rows("layer") is not None:  # rows that the layer's own projections must project
            terms = find_rows(state.cache, attention, earlier).project(
                terms,
                positions,
                lambda rows: self.family.project_rows(attention, rows, self.dims),
            )
        # The spec's factor, if it has one, times that of the model's own scale.
        factor = (terms.find(ScaleFactor) or ScaleFactor(1.0)).factor
        scaled = ScaleFactor(factor * scale_factor)
        terms = Terms([scaled, *terms.without(ScaleFactor)])
        cache = None
        if self.decay_place is not None:
            cache = DecayCache(state.cache, self.decay_place, earlier)
        layer = (query, key, value, shared, state.inputs, cache)
        return self.make_call(*layer, terms=terms, dropout=dropout, need_weights=state.need_weights)

    def rotation(self, shared: Shared, count: int | None = None) -> Rotation | None:
        """Select the rotation for :meth:`make_call`; None if the model's own code applied it."""
        return None if self.is_rotated else super().rotation(shared, count)

    def _check_cache(self, shared: Shared, keys: int) -> None:
        """Refuse a cache that lacks keys that the spec needs, or has room for later keys."""
        src_len = shared.positions.src_len
        if keys == src_len:  # also for graphs of any length, which the comparisons below would fix
            return
        least = src_len
        needed = shared.locality.needed_keys()  # `last`: how many; `first`: further ones, or None
        # transformers' caches can drop all but the last keys, so not if the first are needed, too.
        if needed.last is not None and needed.first is None:
            least = min(src_len, needed.last + shared.positions.tgt_len)
        if not least <= keys <= src_len:
            raise UserError(
                f"the cache has {keys} keys of {src_len} tokens, and this layer's positions need "
                f"the last {least}: {MAKE_CACHES}"
            )


class AttentionWithPositions(Derived):
    """Mixin of the self-attention of a model: its ``forward`` needs the state of a pass."""

    def run_forward(
        self, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Call the stock ``forward`` with what this layer needs; its own ``forward`` does so."""
        state = named.pop(POSITION_STATE, None)
        if state is None:
            raise UserError(CALLED_BY_ITSELF)
        return forward(self, *args, **getattr(self, POSITIONS).prepare(state, args, named))


def attend_with_positions(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention, as a function of transformers' attention interface.

    Attention to an encoder's output has no positions, and uses transformers' own function. In all
    other attention the mask is not used, because the stack has read it already.

    Raises:
        UserError: the positions of the module's model were not set.
    """
    positions = getattr(module, POSITIONS, None)
    state = named.pop(POSITION_STATE, None)
    if positions is None:
        if not hasattr(module, WITHOUT_POSITIONS):
            raise UserError(
                f"attn_implementation={OUR_ATTENTION!r} is for models whose positions were set, "
                "and those of this model were not: call set_positions, or "
                "model.set_attn_implementation('sdpa')"
            )
        attend_plainly: AttentionFunction = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attend_plainly(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
    query, factor = plain_queries(module, query, scaling)
    # `positions` may be PEFT's wrapper around a trained copy, so only its `forward` is called.
    return cast("AttentionFunction", positions)(module, query, key, value, state, factor, dropout)


def plain_queries(module: nn.Module, query: Tensor, scaling: float | None) -> tuple[Tensor, float]:
    """Return an attention's queries as they were projected, and the scale factor of its scores.

    Scores are divided by the root of this factor times D, the width of a head. OPT multiplies its
    queries by the scale, and passes 1, which is undone: terms need plain ones.
    """
    scale = getattr(module, "scaling", None) or scaling or query.size(-1) ** -0.5
    if scaling is not None and scaling != scale:
        query = query * (scaling / scale)
    return query, 1 / (scale**2 * query.size(-1))


def make_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **named: Any) -> Any:
    """Make a mask, as a function of transformers' mask interface.

    It returns the padding mask as it is, because our attention takes the mask from the stack's
    positions, which know no pairs that a causal mask gains. A bidirectional mask is made as for
    sdpa: attention to an encoder's output needs it, and an encoder's own layers ignore it.
    """
    is_causal = getattr(named["config"], "use_bidirectional_attention", None) not in (True, "all")
    if is_causal and _is_union(mask_function):
        raise UserError("tokens of images see later ones, which positions of a text do not know")
    if mask_function is not masking_utils.bidirectional_mask_function:
        return attention_mask
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        mask_function=mask_function, attention_mask=attention_mask, **named
    )


def _is_union(mask_function: Any) -> bool:
    """Check whether a mask has pairs that a causal one lacks, also inside those of packed texts.

    transformers makes such functions of others, which are in their closures.
    """
    if getattr(mask_function, "__name__", "") == "or_mask":
        return True
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]
    return any(map(_is_union, filter(callable, parts)))


AttentionInterface.register(OUR_ATTENTION, attend_with_positions)
AttentionMaskInterface.register(OUR_ATTENTION, make_mask)
