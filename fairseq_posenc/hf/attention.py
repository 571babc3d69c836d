"""The attention function of models with our positions, for transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fairseq_posenc.backends import attend
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.rotation import PairRotation, Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.families import Stack
from fairseq_posenc.positions import Span
from fairseq_posenc.shared import Shared

NAME = "fairseq_posenc"  # of the attention function in transformers
STATE = "position_state"  # keyword that hands a pass's state to the layers
ATTRIBUTE = "positions"  # name of our modules below a stack and below its attentions


class PassState:
    """The position state of a forward pass: what the library computes, and cosines and sines.

    Args:
        shared: of the stack.
        encodings: that layers share.
        stack: of layers.
        dtype: of the layers' inputs.
        width: of the cosines that the model's layers take; 0 where they take none.
        need_weights: whether the attention weights are asked for.
    """

    def __init__(
        self,
        shared: Shared,
        encodings: Encodings,
        stack: Stack,
        dtype: torch.dtype,
        width: int,
        need_weights: bool,
    ) -> None:
        self.shared, self.encodings, self.need_weights = shared, encodings, need_weights
        states = shared.kinds or (shared,)
        self.cosines = [
            make_cosines(state.rotation, stack.family.cosines, width, dtype) for state in states
        ]
        self._keys: dict[tuple[int, int], Rotation | None] = {}

    def key_rotation(self, kind: int, dropped: int) -> Rotation | None:
        """Compute the shared rotation of all keys but the first ``dropped``, once a pass."""
        if (kind, dropped) not in self._keys:
            ids = self.shared.of_kind(kind).positions.places[:, dropped:]
            self._keys[kind, dropped] = self.encodings.rotation(ids, kind)
        return self._keys[kind, dropped]


def make_cosines(
    rotation: Rotation | None, form: str, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Give a rotation the form of a model's cosines and sines, ``(B or 1, T, width)`` each.

    Args:
        rotation: of the last T tokens.
        form: see :class:`~fairseq_posenc.hf.families.Family`.
        width: that the model's layers take.
        dtype: of the result.

    Returns:
        None where the model's layers cannot rotate in this way.
    """
    if not is_cosines(rotation, form, width):
        return None
    assert isinstance(rotation, PairRotation)
    phases = rotation.phases[:, 0]  # [B or 1, T, pairs]
    parts = [phases.real.to(dtype), phases.imag.to(dtype)]
    if form == "doubled":
        parts = [torch.cat([part, part], -1) for part in parts]
    elif form == "pairs":
        parts = [part.repeat_interleave(2, -1) for part in parts]
    return parts[0], parts[1]


def is_cosines(rotation: Rotation | None, form: str, width: int) -> bool:
    """Check whether the layers of a model can apply a rotation: see :func:`make_cosines`."""
    return (
        isinstance(rotation, PairRotation)
        and rotation.decay is None
        and rotation.half == (form != "pairs")
        and rotation.phases.size(-1) * (1 if form == "half" else 2) == width
    )


class AttentionPositions(nn.Module):
    """The positions of a layer's self-attention: its trained encodings, and how they are applied.

    Args:
        encodings: of the layer.
        stack: that the layer is in.
        dims: sizes of the stack.
        kind: of the layer, in the spec.
        rotates: whether the model's own code applies the rotation, from our cosines and sines.
    """

    def __init__(
        self, encodings: Encodings, stack: Stack, dims: Dims, kind: int, rotates: bool
    ) -> None:
        super().__init__()
        self.encodings = encodings
        self.family, self.dims, self.kind, self.rotates = stack.family, dims, kind, rotates

    def give_cosines(
        self, attention: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand this layer's cosines and sines to its attention, as a hook before it runs."""
        state = named.get(STATE)
        if self.rotates and state is not None:
            named["position_embeddings"] = state.cosines[self.kind]
        return args, named

    def attend(
        self,
        attention: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: PassState,
        dropout: float,
        scale: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this layer's encodings.

        Args:
            attention: of the model.
            query: of the new tokens, ``(B, H, T, D)``.
            key: of all tokens that the cache kept, ``(B, G, S, D)``.
            value: of the same.
            state: of the pass.
            dropout: probability of dropping a weight.
            scale: factor of the dot products.

        Returns:
            ``(B, T, H, D)``, and the weights ``(B, H, T, S)`` where they are asked for.

        Raises:
            UserError: the cache holds more keys than there are tokens, or too few.
        """
        shared = state.shared.of_kind(self.kind)
        positions = shared.positions
        tgt_len, src_len = positions.tgt_len, positions.tokens.size(1)
        dropped = src_len - key.size(2)  # the cache has kept the others
        self._check_cache(shared, key.size(2))
        if not self.rotates:
            query, key = self._rotate(query, key, state, dropped)
        groups = query.size(1) // key.size(1)
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        terms = shared.layer_terms() | self.encodings.terms(
            Span.from_lengths(tgt_len, src_len, query.device), positions
        )
        terms = self._project(attention, terms).without_first_keys(dropped)
        factor = 1.0 if terms.scale_factor is None else terms.scale_factor
        attended, weights = attend(
            query,
            key,
            value,
            terms._replace(scale_factor=factor / (scale**2 * self.dims.head_dim)),
            shared.mask("lr" if self.dims.causal else "both").without_first_keys(dropped),
            dropout,
            state.need_weights,
        )
        return attended.transpose(1, 2).contiguous(), weights

    def _rotate(
        self, query: Tensor, key: Tensor, state: PassState, dropped: int
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and all keys, which the cache holds as they are projected."""
        shared = state.shared.of_kind(self.kind)
        positions = shared.positions
        rotation = shared.rotation or self.encodings.rotation(positions.queries(positions.places))
        if rotation is None:
            return query, key
        of_keys = state.key_rotation(self.kind, dropped) or self.encodings.rotation(
            positions.places[:, dropped:]
        )
        assert of_keys is not None
        return rotation.rotate_queries(query), of_keys.rotate_keys(key)

    def _project(self, attention: nn.Module, terms: Terms) -> Terms:
        """Project the rows of terms by the layer's projections of queries and keys."""
        if terms.content_rows is None:
            return terms
        queries, keys = self.family.project_rows(attention, terms.content_rows, self.dims)
        return terms.projected(lambda rows: queries, lambda rows: keys)

    def _check_cache(self, shared: Shared, keys: int) -> None:
        """Refuse a cache of a fixed size, and one that forgets keys which the spec needs."""
        positions = shared.positions
        src_len, needed = positions.tokens.size(1), shared.locality.needed_keys()
        if keys > src_len:
            raise UserError(
                f"the cache holds {keys} keys for {src_len} tokens: caches of a fixed size work "
                "only with encodings that are rotations; leave out cache_implementation"
            )
        least = src_len if needed is None else min(src_len, needed + positions.tgt_len)
        if keys < least:
            raise UserError(
                f"the cache has kept {keys} keys, but this layer's positions need {least}: make "
                "caches after set_positions, as DynamicCache(config=model.config)"
            )


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

    Attention to an encoder's output has no positions, and is transformers' own.

    Raises:
        UserError: the layer was called outside of its stack.
    """
    positions = getattr(module, ATTRIBUTE, None)
    state = named.pop(STATE, None)
    if positions is None:
        attended: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
        return attended
    if state is None:
        raise UserError(
            "a layer was called by itself: its positions are computed once for all layers, when "
            "the model is called"
        )
    scale = getattr(module, "scaling", None) or scaling or query.size(-1) ** -0.5
    if scaling is not None and scaling != scale:  # the queries were scaled already
        query = query * (scaling / scale)
    assert isinstance(positions, AttentionPositions)
    return positions.attend(module, query, key, value, state, dropout, scale)


def make_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **named: Any) -> Any:
    """Return the padding mask itself, which the stack's positions read.

    Attention to an encoder's output takes the mask of transformers' sdpa.
    """
    # transformers 4 makes such masks elsewhere
    if mask_function is not getattr(masking_utils, "bidirectional_mask_function", None):
        return attention_mask
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        mask_function=mask_function, attention_mask=attention_mask, **named
    )


AttentionInterface.register(NAME, attend_with_positions)
AttentionMaskInterface.register(NAME, make_mask)
