"""Splits attention scores into parts: from content, from position, and from both together.

The attention report and the plots show the parts. Each part is a difference of scores that the
reference backend computes with some of the terms. The letters of shapes are those of
:mod:`~fairseq_posenc.encodings.base`.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms


class Split(NamedTuple):
    """The scores before mask and softmax as a sum of three parts, ``(B, H, T, S)`` in float64.

    Attributes:
        content: scaled dot products of query and key without positions.
        position: the biases.
        both: the rest, which depends on content and position.
        details: what each term alone adds to the scores, by its name or ``rotation``. They add up
            to ``both``, unless a temperature or a cap changes their sum. If scores are a product,
            these are its factors instead: dot products before scaling.
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

    @property
    def sort_key(self) -> tuple[bool, bool, int]:
        """Sorts by layer the encoder, then the decoder, then encoder-decoder attention."""
        return self.stack == "decoder", self.cross, self.layer


@contextmanager
def with_attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects, as ``(object, name, value)``, while the block runs.

    With it, callers capture the arguments and results of a model's attention.
    """
    with ExitStack() as restoring:
        for owner, name, value in changes:
            if name in vars(owner):  # an attribute of its own: put it back
                restoring.callback(setattr, owner, name, vars(owner)[name])
            else:  # the attribute is its class's, or new
                restoring.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def split(
    query: Tensor,
    key: Tensor,
    terms: Terms,
    rotation: Rotation | None = None,
    key_rotation: Rotation | None = None,
    mask: Mask = Mask(),  # noqa: B008  (immutable)
) -> Split:
    """Split the scores into their parts.

    Args:
        query: projected queries, neither scaled nor rotated, ``(B, H, T, D)``.
        key: projected keys, not rotated, ``(B, H, S, D)``.
        terms: terms of the layer; rows of ``layer`` are projected (``Terms.projected``).
        rotation: rotation of the queries, or None.
        key_rotation: rotation of the keys, if they are not the queries' tokens.
        mask: tells encodings that count the visible keys which these are; no score is hidden.
    """
    query, key = query.double(), key.double()
    terms = terms.map(lambda x: x.double() if x.is_floating_point() else x)

    def compute(*names: str) -> Tensor:
        """Compute the scores with some of the terms; a reset belongs to any table."""
        some = Terms([x for x in terms if x.name in (*names, "scale_factor", "reset")])
        return reference.scores(query, key, some, mask)

    content = compute()
    if rotation is not None:
        query, key = rotation.rotate_queries(query), (key_rotation or rotation).rotate_keys(key)
    rotated = compute()
    names = [term.name for term in terms]
    biases = [compute(name) - rotated for name in names if name in ("bias", "pair_bias")]
    # A table is multiplied with the states, so neither adds anything without the other.
    state_scores = None
    if "state_table" in names:
        state_scores = compute("state_table", "states") - rotated
    if terms.product and state_scores is not None:  # added after the product
        biases.append(state_scores)
    position = sum(biases, torch.zeros_like(content))
    both = compute(*names) - content - position
    factors_or_summands = ("gain", "channel_gain", "query_table", "key_table")
    details = {name: compute(name) - rotated for name in names if name in factors_or_summands}
    if terms.product:
        scale = terms.scale(query.size(-1))
        factors = {name: x / scale for name, x in {"content": rotated, **details}.items()}
        return Split(content, position, both, factors, product=True)
    if state_scores is not None:
        details["state_table"] = state_scores
    if rotation is not None:
        details["rotation"] = rotated - content
    for name in ("decay", "counted_table"):
        if name in names:
            details[name] = compute(name) - rotated
    return Split(content, position, both, details, product=False)
