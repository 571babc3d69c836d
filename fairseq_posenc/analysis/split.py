"""Splits attention scores into parts: from content, from position, and from both together.

The attention report and the plots show the parts. Each part is a difference of scores that the
reference backend computes with some of the terms. B batch, H heads, T queries, S keys, D head size.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.term import Reset, RowsByDistance, ScaleFactor, States
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NO_MASK, Mask

_BIASES = ("bias", "pair_bias")  # names of terms, `Term.name`: numbers by distance, and by pair
_FACTORS = ("query_table", "key_table")  # vectors by distance; products have no gain beside them
_PAIRWISE = (*_BIASES, *_FACTORS, "gain", "channel_gain", "state_table", "decay", "counted_table")


class Split(NamedTuple):
    """The scores before mask and softmax as a sum of three parts, ``(B, H, T, S)`` in float64.

    Attributes:
        content: scaled dot products of query and key without positions.
        position: the biases; with a product, also the ``state_table`` (vectors by distance, times a
            second projection of the query's token), which depends on content.
        both: the rest, which depends on content and position.
        details: what each term alone adds to the scores, by its name or ``rotation``. They add up
            to ``both``, but not with a temperature, a cap, or a gain beside a ``counted_table``
            (vectors by positions that are counted in the content). If scores are a product, these
            are its factors instead: unscaled dot products.
        product: whether the details are factors; else they are summands.
    """

    content: Tensor
    position: Tensor
    both: Tensor
    details: dict[str, Tensor]
    product: bool

    @property
    def scores(self) -> Tensor:
        """The sum of the parts."""
        return self.content + self.position + self.both


class CapturedAttention(NamedTuple):
    """Weights and scores of one attention."""

    stack: str  # `encoder` or `decoder`
    cross: bool  # whether it is encoder-decoder attention
    layer: int  # counted from 0
    weights: Tensor  # [B, H, T, S]
    split: Split  # of the scores; content alone if no encoding acts on them


def split(
    query: Tensor,
    key: Tensor,
    terms: Terms,
    rotation: Rotation | None = None,
    key_rotation: Rotation | None = None,
    mask: Mask = NO_MASK,
) -> Split:
    """Split the scores into their parts.

    Args:
        query: projected queries, neither scaled nor rotated, ``(B, H, T, D)``.
        key: projected keys, not rotated, ``(B, H, S, D)``.
        terms: terms of the layer, whose projections have been applied (``Terms.projected``).
        rotation: rotation of the queries, or None.
        key_rotation: rotation of the keys, if they are not the queries' tokens.
        mask: used by encodings that count the visible keys; no score is hidden.
    """
    query, key = query.double(), key.double()
    terms = terms.map(lambda x: x.double() if x.is_floating_point() else x)
    always = [x for x in terms if isinstance(x, (ScaleFactor, Reset, States))]
    content = reference.scores(query, key, Terms(always), mask)  # the others need tables
    if rotation is not None:
        query, key = rotation.rotate_queries(query), (key_rotation or rotation).rotate_keys(key)
    rotated = reference.scores(query, key, Terms(always), mask)  # the content of rotated tokens
    added = {}  # by the name of a term: what it alone adds to the scores
    for x in terms:
        if x.name in _PAIRWISE:
            # Rows that multiply are added here, so the difference has their scaled dot products.
            term = replace(x, multiplies=False) if isinstance(x, RowsByDistance) else x
            added[x.name] = reference.scores(query, key, Terms([*always, term]), mask) - rotated
    # Rows of states are added after a product, so the scores without `position` are the product.
    names = (*_BIASES, "state_table") if terms.product else _BIASES
    position = sum((added[x] for x in names if x in added), torch.zeros_like(content))
    both = reference.scores(query, key, terms, mask) - content - position
    if terms.product:
        factors = {"content": rotated} | {x: added[x] for x in _FACTORS if x in added}
        details = {name: x / terms.scale(query.size(-1)) for name, x in factors.items()}
    else:
        details = {name: x for name, x in added.items() if name not in names}
        if rotation is not None:
            details["rotation"] = rotated - content
    return Split(content, position, both, details, terms.product)
