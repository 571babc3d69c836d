"""Scores, biases and gains by distance: a panel a layer, a line a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.distances import mean_by_distance
from fairseq_posenc.workbench.plots.stacks import Stack, terms_of

if TYPE_CHECKING:  # it brings fairseq, which pictures of specs do without
    from fairseq_posenc.transformer.capture_attention import CapturedAttention

_MOST = 48  # panels that are still readable


class Curves(NamedTuple):
    """What depends on the distance in a layer, or in all layers alike.

    Attributes:
        title: what it is and where.
        distances: ``(R,)``.
        values: ``(heads, R)``; of one head where all share it.
    """

    title: str
    distances: Tensor
    values: Tensor


@torch.no_grad()
def curves_of(
    stack: Stack,
    layers: Sequence[int],
    heads: Sequence[int],
    reach: int,
    seen: Sequence[CapturedAttention] = (),
) -> list[Curves]:
    """Return the mean score, and the biases and gains that it is made with, by distance.

    Args:
        stack: of a model, or of a spec.
        layers: counted from 0.
        heads: likewise.
        reach: the largest distance, if the tables go so far.
        seen: what a model's attention did; without it, scores are those of equal random contents
            (:meth:`~fairseq_posenc.api.PositionEncoding.distance_curve`).
    """
    reach = stack.furthest(reach)
    scores = {
        each.layer: each.split for each in seen if each.stack == stack.name and not each.cross
    }
    found = []
    for layer in layers if scores else ():
        distances, means = mean_by_distance(scores[layer].scores)
        found.append(Curves(f"score, layer {layer + 1}", distances, means[list(heads)]))
    if not scores:
        equal = stack.layers[0].distance_curve(reach)[list(heads)]
        found = [Curves("score of equal contents", grids.distances(-reach, reach), equal)]
    for layer in layers if stack.differ else layers[:1]:
        found += _numbers(stack, layer, heads)
    return [_within(curves, reach, stack.causal) for curves in found]


def draw_curves(curves: Sequence[Curves], heads: Sequence[int], title: str) -> Any:
    """Return a Figure with a panel for each of the curves, and a line in it for each head.

    Raises:
        UserError: there are too many for a picture.
    """
    if len(curves) > _MOST:
        raise UserError(f"{len(curves)} panels are too many for a picture: choose --layer")
    figure, panels = grids.new(len(curves), title, 2 if len(curves) in (2, 4) else 3, ratio=0.8)
    names = grids.heads(heads)
    for axes, (what, distances, values) in zip(panels, curves):
        grids.lines(axes, distances, values, names if len(values) == len(names) else ["all heads"])
        grids.label(axes, what, "distance j - i", "")
    most = max(range(len(curves)), key=lambda index: len(curves[index].values))
    grids.name_lines(figure, panels[most])
    return figure


def _numbers(stack: Stack, layer: int, heads: Sequence[int]) -> Iterator[Curves]:
    """Yield the terms of a layer that are one number for each distance."""
    span, terms = terms_of(stack.layers[layer], stack.max_positions)
    distances = span.distances()
    for name, term, tensor in terms.given():
        if term.rows is not None and not term.has_vectors:
            chosen = list(heads) if term.per_head(tensor) else [0]
            yield Curves(
                f"{name}, {stack.where(layer)}", distances, tensor[chosen, : len(distances)]
            )


def _within(curves: Curves, reach: int, causal: bool) -> Curves:
    """Return the part of curves up to a reach, and in a causal stack that of the past."""
    far = curves.distances
    kept = (far >= -reach) & (far <= (0 if causal else reach))
    return curves._replace(distances=far[kept], values=curves.values[:, kept])
