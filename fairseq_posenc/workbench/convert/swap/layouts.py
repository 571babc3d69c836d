"""Queries and keys of a rotary model for another layout of pairs: the same model, other order.

Scores are sums over coordinates, so that a head's queries and keys may have theirs in any order, as
long as it is one. Rotations name the coordinates that are a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Optional, cast

import torch
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Item, Layer, Spec


def reordered(
    prefix: str, stack: Any, old: Spec, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of a stack's queries and keys for its layout; nothing if that is the same.

    Args:
        prefix: of the names of its parameters.
        stack: with the new positions.
        old: positions that the weights were trained with.
        weights: of the model.

    Raises:
        UserError: another encoding of the stack has vectors that queries or keys are multiplied by.
    """
    dims, spec = stack.assembly.dims, stack.assembly.spec
    attentions = ["self_attn"]
    if getattr(stack, "rotates_source", False):
        attentions.append("encoder_attn")
    found = {}
    for layer in range(len(stack.layers)):
        before, now = (_rotary(each, layer, dims) for each in (old, spec))
        if before is None or now is None or before.rotated != now.rotated:
            continue
        if before.layout == now.layout:
            continue
        _refuse_vectors(stack)
        index = torch.empty_like(now.order())
        index[now.order()] = before.order()
        for name in _projections(f"{prefix}layers.{layer}", attentions):
            rows = weights[name].unflatten(0, (dims.num_heads, -1))[:, index]  # [H, D, ...]
            found[name] = rows.flatten(0, 1)
    return found


def without_layout(spec: Spec) -> Spec:
    """Return positions, each rotation of which has the layout that is its default."""

    def plain(layer: Layer) -> Layer:
        options = (dict(item.options) for item in layer)
        without = ({key: x for key, x in each.items() if key != "layout"} for each in options)
        return tuple(Item.canonical(item.name, each) for item, each in zip(layer, without))

    layers = tuple(map(plain, spec.layers))
    return Spec(plain(spec.whole), layers).keep(range(len(layers)))


def _rotary(spec: Spec, layer: int, dims: Dims) -> Optional[Rope]:
    """Build the rotary encoding of a layer, if it has one."""
    for item in spec.keep([layer]).items:
        if issubclass(registry.get(item.name), Rope):
            (built,) = registry.build({item.name: item}, dims).each()
            return cast(Rope, built)
    return None


def _projections(layer: str, attentions: list[str]) -> Iterator[str]:
    """Name the parameters that make a layer's queries and keys."""
    for attention, part in product(attentions, ("q_proj", "k_proj")):
        yield from (f"{layer}.{attention}.{part}.{kind}" for kind in ("weight", "bias"))


def _refuse_vectors(stack: Any) -> None:
    """Refuse an order of coordinates that vectors of another encoding do not have."""
    if not all(terms.content_only for terms in stack.assembly.check("auto")):
        raise UserError(
            f"{stack.assembly.spec}: the layout of pairs can be changed beside encodings that add "
            "numbers to the scores, not beside those whose vectors meet queries or keys"
        )
