"""Queries and keys of a rotary model for another layout of pairs: the same model, other order.

Scores are sums over coordinates, so that a head's queries and keys may have theirs in any order, as
long as it is one. Rotations name the coordinates that are a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Item, Spec


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
    before, now = _rotary(registry.build(old, dims)), _rotary(registry.build(spec, dims))
    if before is None or now is None or before.rotated != now.rotated:
        return {}
    if before.layout == now.layout:
        return {}
    _refuse_vectors(stack)
    index = torch.empty_like(now.order())
    index[now.order()] = before.order()
    crosses = getattr(stack, "rotates_source", False)
    heads = dims.num_heads
    found = {}
    for name in _projections(prefix, len(stack.layers), crosses):
        for kind in ("weight", "bias"):
            weight = weights[f"{name}.{kind}"]
            rows = weight.unflatten(0, (heads, -1))[:, index]  # [H, D, ...]
            found[f"{name}.{kind}"] = rows.flatten(0, 1)
    return found


def without_layout(spec: Spec) -> Spec:
    """Return positions, each rotation of which has the layout that is its default."""
    items = ({key: value for key, value in item.options if key != "layout"} for item in spec.items)
    return Spec(tuple(Item.canonical(item.name, rest) for item, rest in zip(spec.items, items)))


def _rotary(encodings: registry.Encodings) -> Optional[Rope]:
    return next((each for each in encodings.each() if isinstance(each, Rope)), None)


def _projections(prefix: str, layers: int, crosses: bool) -> Iterator[str]:
    attentions = ("self_attn", "encoder_attn") if crosses else ("self_attn",)
    for layer in range(layers):
        for attention in attentions:
            for part in ("q_proj", "k_proj"):
                yield f"{prefix}layers.{layer}.{attention}.{part}"


def _refuse_vectors(stack: Any) -> None:
    """Refuse an order of coordinates that vectors of another encoding do not have."""
    terms = stack.assembly.check("auto")
    if not terms.content_only:
        raise UserError(
            f"{stack.assembly.spec}: the layout of pairs can be changed beside encodings that add "
            "numbers to the scores, not beside those whose vectors meet queries or keys"
        )
