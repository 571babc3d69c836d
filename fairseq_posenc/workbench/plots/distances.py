"""Pictures by distance: scores, biases and gains; products of input vectors; rope's bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.stacks import PlottedStack, compute_terms, make_positions

if TYPE_CHECKING:  # it brings fairseq, which pictures of specs do without
    from fairseq_posenc.transformer.capture_attention import CapturedAttention

_SEED = 1


class Curves(NamedTuple):
    """Values by distance, of a layer or of all layers alike."""

    title: str  # name of the values and of the layer
    distances: Tensor  # `(R,)`
    values: Tensor  # `(heads, R)`; of one head where all share it


def mean_by_distance(values: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the mean over sentences and pairs of tokens at each distance j - i.

    Args:
        values: of each pair, ``(B, H, T, S)``.
        counted: which pairs count, ``(B, T, S)``; None for all.

    Returns:
        Distances ``(R,)`` and means ``(H, R)``, without distances of which no pair counts.
    """
    batch, heads, tgt_len, src_len = values.shape
    if counted is None:
        counted = torch.ones(batch, tgt_len, src_len, dtype=torch.bool)
    values = values.masked_fill(~counted[:, None], 0.0).sum(0).double()
    pairs = torch.arange(src_len) - torch.arange(tgt_len)[:, None] + tgt_len - 1  # from 0
    count = tgt_len + src_len - 1
    sums = torch.zeros(heads, count, dtype=torch.double).index_add(
        1, pairs.flatten(), values.flatten(1)
    )
    number = torch.bincount(pairs.flatten(), counted.sum(0).flatten().double(), count)
    there = number > 0
    distances = torch.arange(count) - tgt_len + 1
    return distances[there], sums[:, there] / number[there]


@torch.no_grad()
def compute_curves(
    stack: PlottedStack,
    layers: Sequence[int],
    heads: Sequence[int],
    reach: int,
    seen: Sequence[CapturedAttention] = (),
) -> list[Curves]:
    """Compute the mean score by distance, and the biases and gains that it is made with.

    Without ``seen``, the attention of a trained model, scores are those of equal random contents
    (:meth:`~fairseq_posenc.api.PositionEncoding.distance_curve`).
    """
    reach = stack.limit_reach(reach)
    scores = {
        each.layer: each.split for each in seen if each.stack == stack.name and not each.cross
    }
    found = []
    for layer in layers if scores else ():
        distances, means = mean_by_distance(scores[layer].scores)
        found.append(Curves(f"score, layer {layer + 1}", distances, means[list(heads)]))
    if not scores:
        equal = stack.layers[0].distance_curve(reach)[list(heads)]
        found = [Curves("score of equal contents", torch.arange(-reach, reach + 1), equal)]
    for layer in layers if stack.has_own_encodings else layers[:1]:
        found += _compute_term_curves(stack, layer, heads)
    return [_cut_curves(curves, reach, stack.dims.causal) for curves in found]


def draw_curves(curves: Sequence[Curves], heads: Sequence[int], title: str) -> Any:
    """Draw a Figure with a panel for each of the curves, and a line in it for each head.

    Raises:
        UserError: there are too many for a picture.
    """
    if len(curves) > grids.MOST:
        raise UserError(f"{len(curves)} panels are too many for a picture: choose --layer")
    figure, panels = grids.new_panels(
        len(curves), title, 2 if len(curves) in (2, 4) else 3, ratio=0.8
    )
    names = grids.name_heads(heads)
    for axes, (what, distances, values) in zip(panels, curves):
        grids.draw_lines(
            axes, distances, values, names if len(values) == len(names) else ["all heads"]
        )
        grids.label_axes(axes, what, "distance j - i", "")
    most = max(range(len(curves)), key=lambda index: len(curves[index].values))
    grids.draw_legend(figure, panels[most])
    return figure


def _compute_term_curves(stack: PlottedStack, layer: int, heads: Sequence[int]) -> Iterator[Curves]:
    """Yield the terms of a layer that are one number for each distance."""
    span, terms = compute_terms(stack.layers[layer], stack.dims.max_positions)
    distances = span.distances()
    for name, term, tensor in terms.given():
        if term.rows is not None and not term.has_vectors:
            chosen = list(heads) if term.per_head(tensor) else [0]
            values = tensor[chosen, : len(distances)]
            yield Curves(f"{name}, {stack.name_layer(layer)}", distances, values)


def _cut_curves(curves: Curves, reach: int, causal: bool) -> Curves:
    """Cut curves to a reach, and in a causal stack to the past."""
    far = curves.distances
    kept = (far >= -reach) & (far <= (0 if causal else reach))
    return curves._replace(distances=far[kept], values=curves.values[:, kept])


def compute_products(
    vectors: Tensor, reach: int, projections: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute W_q p_t . W_k p_(t+k) of each head, ``(H, 2 * reach + 1)``, k from -reach to reach.

    Args:
        vectors: p, ``(n, C)``; t is its middle.
        reach: less than half of n.
        projections: W_q and W_k, ``(H, D, C)``; None for p_t . p_(t+k) itself, as of one head.
    """
    middle = vectors.size(0) // 2
    around = vectors[middle - reach : middle + reach + 1]
    if projections is None:
        return (around @ vectors[middle])[None]
    query, key = projections
    return torch.einsum("hd,hrd->hr", query @ vectors[middle], around @ key.transpose(1, 2))


def _draw_projections(stack: PlottedStack) -> tuple[Tensor, Tensor]:
    """Draw W_q and W_k ``(H, D, C)``, normal with standard deviation C^-0.5, from a seed."""
    dims = stack.dims
    generator = torch.Generator().manual_seed(_SEED)
    size = (2, dims.num_heads, dims.head_dim, dims.embed_dim)
    query, key = torch.randn(size, generator=generator) * dims.embed_dim**-0.5
    return query, key


@torch.no_grad()
def draw_products(
    stack: PlottedStack, layers: Sequence[int], heads: Sequence[int], reach: int, title: str
) -> Any:
    """Draw products of input vectors: themselves, through random projections, the model's.

    Sinusoids' dot products depend on the distance alone and fall with it. Once projected to queries
    and keys, as attention does, they do not (Yan et al. 2019, "TENER", arXiv:1911.04474, 3.2).

    Raises:
        UserError: nothing is added at the input.
    """
    vectors = stack.compute_input_vectors()
    if vectors is None:
        raise UserError(f"{stack.spec} adds no vectors at the input, so it has no products to show")
    reach = stack.limit_reach(reach)
    drawn = {
        "themselves": compute_products(vectors, reach),
        "random projections": compute_products(vectors, reach, _draw_projections(stack))[
            list(heads)
        ],
    }
    for layer in layers if stack.projections else ():
        own = compute_products(vectors, reach, stack.projections[layer])
        drawn[f"projections of layer {layer + 1}"] = own[list(heads)]
    figure, panels = grids.new_panels(len(drawn), title, columns=3, ratio=0.9)
    for axes, (name, rows) in zip(panels, drawn.items()):
        names = grids.name_heads(heads) if rows is not drawn["themselves"] else ["all channels"]
        grids.draw_lines(axes, torch.arange(-reach, reach + 1), rows, names)
        grids.label_axes(axes, name, "distance k", "")
    grids.draw_legend(figure, panels[1])
    return figure


def compute_rotary_bound(turn: Tensor) -> Tensor:
    """Compute the mean of abs(S_1) .. abs(S_(d/2)), where S_j is the sum of the first j turns.

    A rotary score of whatever query and key is at most this times d/2 times the largest change from
    one pair of coordinates to the next (Su et al. 2021, "RoFormer", arXiv:2104.09864, 3.4.3).

    Args:
        turn: e^(i m theta_t) of each distance and pair, ``(..., d/2)``.

    Returns:
        ``(...)``; d/4 + 1/2 at distance 0.
    """
    return turn.to(torch.complex128).cumsum(-1).abs().mean(-1)


@torch.no_grad()
def draw_decay(stack: PlottedStack, reach: int, title: str) -> Any:
    """Draw a Figure of rope's bound at distances 0 to ``reach``.

    Raises:
        UserError: nothing is rotated.
    """
    rotation = stack.layers[0].shared.rotation(make_positions(reach + 1).ids)
    if not isinstance(rotation, PairRotation) or rotation.decay is not None:
        raise UserError(f"{stack.spec} has no bound of decay; only rope has one")
    figure, (axes,) = grids.new_panels(1, title, columns=1, ratio=0.75)
    names = [f"{2 * rotation.phases.size(-1)} coordinates of a head"]
    grids.draw_lines(axes, torch.arange(reach + 1), compute_rotary_bound(rotation.phases[0]), names)
    grids.label_axes(axes, "bound of the score", "distance", "mean of |S_j|")
    return figure
