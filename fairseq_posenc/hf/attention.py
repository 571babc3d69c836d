"""Computes attention with our positions, as a function of transformers' attention interface.

A stack passes the state of a pass (:class:`PassState`) to its layers. Each selects its own part
(:class:`LayerState`), with which transformers calls the function, beside queries and keys.

If the model's own code rotates, the cache has rotated keys; if ours does, unrotated ones. B batch,
T new of S tokens, of which K have keys, H heads (G of keys), D head size, C model size, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fairseq_posenc.assembly import build_layer
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.derived import Derived
from fairseq_posenc.encodings.term import Decay, ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import caches
from fairseq_posenc.hf.settings import LAYER_STATE, OUR_ATTENTION, PASS_STATE, POSITIONS
from fairseq_posenc.hf.stack_forward import HFStackPositions, PassState
from fairseq_posenc.hf.stand_ins import CALLED_BY_ITSELF, OWN_CODE, WITHOUT_POSITIONS
from fairseq_posenc.modules.attention_core import AttentionCore, Kept, use_kept
from fairseq_posenc.shared import Shared


@dataclass
class LayerState:
    """What a layer's ``forward`` passes to our attention function, by way of the model's code."""

    shared: Shared  # the part of the pass's state for this kind of layer
    inputs: Tensor  # of the layer, `(B, T, C)`; `fox` computes forget gates from them, for example
    cache: Cache | None
    gates_layer: int  # the layer of a cache, after those of the model, that keeps forget gates
    need_weights: bool  # whether attention weights are requested
    is_used: bool = False  # whether the model's code has called our function


class AttentionPositions(AttentionCore, nn.Module):
    """The positions of a layer's self-attention: its trained encodings, and how they are applied.

    The stack's ``positions`` are read, not kept; ``index`` counts layers with attention.
    """

    def __init__(self, positions: HFStackPositions, index: int) -> None:
        super().__init__()
        self.plan = positions.layer_plans[index]
        self.spec, self.family, self.backend = positions.spec, positions.family, positions.backend
        self.dims = positions.dims._replace(own_head_dim=self.plan.head_dim)
        self.encodings = build_layer(positions.spec, self.dims, index)  # AttentionCore reads them

    def forward(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        """Attend: arguments of :meth:`prepare_call` -> ``(B, T, H, D)``, weights or None."""
        attended, weights = attend(self.prepare_call(*args), self.backend)
        return attended.transpose(1, 2).contiguous(), weights

    def prepare_call(
        self,
        attention: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: LayerState,
        scale_factor: float,
        dropout: float = 0.0,
    ) -> AttentionCall:
        """Build the call of a backend; with forget gates, also add to the cache of their decay.

        Args:
            attention: the model's attention module.
            query: queries of the new tokens, ``(B, H, T, D)``.
            key: keys in the cache and new ones, ``(B, G, K, D)``; the model's code may rotate them.
            value: their values, ``(B, G, K, D)``.
            state: state of the layer in the forward pass.
            scale_factor: see :func:`plain_queries`.
            dropout: probability of dropping a weight.

        Raises:
            UserError: the cache has more keys than there are tokens, or too few.
        """
        if query.size(1) != (heads := self.dims.num_heads):
            raise UserError(
                f"a layer has {query.size(1)} of {heads} heads (by tp_plan, or unlike others), and "
                "terms need all: use rotations and attention 'sdpa', else device_map or FSDP"
            )
        plan, shared, cache = self.plan, state.shared, state.cache
        self._check_cache(shared, key.size(2))
        positions = shared.positions  # of all S tokens
        past = positions.src_len - query.size(2)  # number of tokens before the T new ones
        terms = self.collect_terms(shared)  # AttentionCore's: all but those of the input, below
        if terms.rows("layer") is not None:  # DeBERTa's table, `(R, C)`: each layer projects it
            project = partial(self.family.project_rows, attention, dims=self.dims)
            projected = caches.find_projected_rows(cache, attention, past)
            terms = projected.project(terms, positions, project)  # with rows `(H, R, D)` instead
        # c of the scale 1 / sqrt(c * D): the spec's, or 1, times that of the model's own scale.
        factor = (terms.find(ScaleFactor) or ScaleFactor(1.0)).factor
        terms = Terms([ScaleFactor(factor * scale_factor), *terms.without(ScaleFactor)])
        past_decay = caches.read_decay(cache, state.gates_layer, past) if plan.is_gated else None
        of_input = self.encodings.input_terms(state.inputs, positions, past_decay)
        if cache is not None and (decay := of_input.find(Decay)) is not None:
            caches.store_decay(cache, state.gates_layer, decay)
        if not plan.is_rotated:  # not by the model's code: ours rotates, if the spec says so
            query, key = self.rotate_tokens(query, key, shared)
        mask = shared.mask.with_direction(plan.direction)
        call = AttentionCall(query, key, value, terms | of_input, mask, dropout, state.need_weights)
        return use_kept(call, Kept(key, value), positions.src_len)  # cuts terms and mask to K

    def _check_cache(self, shared: Shared, keys: int) -> None:
        """Refuse a cache that lacks keys that the spec needs, or has room for later keys."""
        src_len, tgt_len = shared.positions.src_len, shared.positions.tgt_len
        if keys == src_len:  # the comparisons below would specialize a graph to this length
            return
        needed, least = shared.needed_keys(), src_len
        # `last`: number of last keys needed, None for all. With `first` ones, caches keep all keys.
        if needed.last is not None and needed.first is None:
            least = min(src_len, needed.last + tgt_len)
        if not least <= keys <= src_len:
            raise UserError(
                f"the cache has {keys} keys of {src_len} tokens, and this layer's positions need "
                f"the last {least}: {caches.CACHE_ADVICE}"
            )


class AttentionWithPositions(Derived):
    """Mixin of the self-attention of a model: its ``forward`` needs the state of a pass."""

    def run_forward(
        self, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run in place of the stock ``forward``, which gets the layer's cosines and state too."""
        state: PassState | None = named.pop(PASS_STATE, None)
        if state is None:
            raise UserError(CALLED_BY_ITSELF)
        if (config := vars(self)["config"])._attn_implementation != state.attention:
            config._attn_implementation = state.attention  # a copied layer has its own `config`
        plan = getattr(self, POSITIONS).plan  # of AttentionPositions, or PEFT's wrapper of a copy
        inputs: Tensor = args[0] if args else named["hidden_states"]
        if plan.is_rotated:
            named["position_embeddings"] = state.cosines[plan.kind]
        elif width := plan.cosine_width:  # cosines of 1 and sines of 0 rotate nothing
            ones = torch.ones(1, 1, width, dtype=inputs.dtype, device=inputs.device)
            named["position_embeddings"] = (ones, torch.zeros_like(ones))
        if state.shared is None:  # the model's own attention is used
            return forward(self, *args, **named)
        cache = caches.find_self_cache([*named.values(), *args])
        gates_layer = state.num_layers + (getattr(self, "layer_idx", 0) or 0)  # after the model's
        layer = LayerState(state.shared[plan.kind], inputs, cache, gates_layer, state.need_weights)
        output = forward(self, *args, **named, **{LAYER_STATE: layer})
        if not layer.is_used:
            raise UserError(f"{type(self).__name__} {OWN_CODE}")
        return output


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
    other attention the mask is not used, because the stack has read it already. A model whose
    positions were not set is refused.
    """
    positions: Any = getattr(module, POSITIONS, None)  # AttentionPositions, or PEFT's wrapper
    state: LayerState | None = named.pop(LAYER_STATE, None)
    # A layer without a state was put into a stack that uses its model's own attention.
    if positions is None or state is None:
        if not hasattr(module, WITHOUT_POSITIONS):
            raise UserError(
                f"{type(module).__name__}: {OUR_ATTENTION!r} is for models whose positions were "
                "set with all layers: call set_positions, or set_attn_implementation('sdpa')"
            )
        stock: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return stock(module, query, key, value, attention_mask, dropout, scaling, **named)
    state.is_used = True
    query, factor = plain_queries(module, query, scaling)
    # PEFT's wrapper selects the copy in its `forward`, so no other method is called.
    return positions(module, query, key, value, state, factor, dropout)


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
    """Return the padding mask as it is, as a function of transformers' mask interface.

    Our attention makes its masks from the stack's positions; a causal mask with more pairs, which
    these do not know, is refused. A bidirectional mask is sdpa's: attention to an encoder needs it.
    """
    # True or "all": Gemma's text encoders.
    is_causal = getattr(named["config"], "use_bidirectional_attention", None) not in (True, "all")
    # True only if nothing was added to the mask. Read first: compilers cannot read closures, below.
    may_skip = named.get("allow_is_causal_skip") or named.get("allow_is_bidirectional_skip")
    if is_causal and not may_skip and _is_union(mask_function):
        raise UserError("tokens of images see later ones, which positions of a text do not know")
    if mask_function is not masking_utils.bidirectional_mask_function:
        return attention_mask
    make_stock_mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return make_stock_mask(mask_function=mask_function, attention_mask=attention_mask, **named)


def _is_union(part: Any) -> bool:
    """Check whether a mask has pairs that a causal one lacks: it is, or contains, an ``or_mask``.

    transformers makes mask functions of others, which are in their closures, also in tuples.
    """
    if isinstance(part, tuple):
        return any(map(_is_union, part))
    cells = getattr(part, "__closure__", None) or ()
    is_union = getattr(part, "__name__", "") == "or_mask"
    return is_union or any(_is_union(cell.cell_contents) for cell in cells)


AttentionInterface.register(OUR_ATTENTION, attend_with_positions)
AttentionMaskInterface.register(OUR_ATTENTION, make_mask)
