"""Draws curves by distance: scores, biases, gains; attention; products of vectors; rope's bound.

A distance is j - i for query i and key j, so that later keys have positive distances. ``Any``
stands for matplotlib's Figure, which is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.encodings.term import NumbersByDistance
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.subject import Subject, make_positions
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import PALE

_SEED = 1  # of random projections


class Curves(NamedTuple):
    """Values by distance in one layer, or in all layers if they share them."""

    title: str  # name of the values and of the layer
    distances: Tensor  # `(R,)` for R distances
    values: Tensor  # `(heads, R)`, or `(1, R)` if all heads share them

    def between(self, low: int, high: int) -> Curves:
        """Select the distances from ``low`` to ``high``."""
        shown = (self.distances >= low) & (self.distances <= high)
        return Curves(self.title, self.distances[shown], self.values[:, shown])


def mean_by_distance(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean over sentences and pairs of tokens at each distance.

    Args:
        values: value of each pair, ``(B, H, T, S)``.
        counted: whether a pair counts, ``(B, T, S)``.

    Returns:
        Distances ``(R,)`` and means ``(H, R)``; distances at which no pair counts are missing.
    """
    tgt_len, src_len = values.shape[2:]
    values = values.double().masked_fill(~counted[:, None], 0.0)
    means = {}
    for distance in range(1 - tgt_len, src_len):
        if number := counted.diagonal(distance, 1, 2).sum():
            means[distance] = values.diagonal(distance, 2, 3).sum((0, 2)) / number  # [H]
    return torch.tensor(list(means)), torch.stack(list(means.values()), 1)


@torch.no_grad()
def compute_curves(
    subject: Subject, captured: Sequence[CapturedAttention] = (), reach: int = 32
) -> list[Curves]:
    """Compute the mean score by distance up to ``reach``, and the biases and gains in it.

    Without ``captured`` attention of a trained model, scores are those of equal random contents
    (:meth:`~fairseq_posenc.api.PositionEncoding.distance_curve`).
    """
    reach, heads = subject.limit_reach(reach), subject.heads
    curves = []
    for attention in captured:
        is_self_attention = attention.stack == subject.stack and not attention.cross
        if is_self_attention and attention.layer in subject.layers:
            scores = attention.split.scores
            all_pairs = torch.ones_like(scores[:, 0], dtype=torch.bool)
            distances, means = mean_by_distance(scores, all_pairs)
            curves.append(Curves(f"score, layer {attention.layer + 1}", distances, means[heads]))
    for layer in () if captured else subject.different_layers:
        equal = subject.encodings[layer].distance_curve(reach)[heads]
        title = f"score of equal contents, {subject.name_layer(layer)}"
        curves.append(Curves(title, torch.arange(-reach, reach + 1), equal))
    for layer in subject.different_layers:
        span, terms = subject.compute_terms(layer)
        distances = span.distances()
        for term in terms:
            if isinstance(term, NumbersByDistance):  # a reset's rows follow those of distances
                values = term.table[heads if term.per_head else [0], : len(distances)]
                title = f"{term.name}, {subject.name_layer(layer)}"
                curves.append(Curves(title, distances, values))
    last = 0 if subject.dims.causal else reach  # a causal stack has no later keys
    return [curve.between(-reach, last) for curve in curves]


def draw_scores(subject: Subject, reach: int = 32) -> Any:
    """Draw a panel for each of the curves by distance, with a line for each head."""
    captured = []
    if subject.model:
        from fairseq_posenc.workbench.plots.model_inputs import attention_to_random_symbols

        # A length that has many pairs at each distance.
        captured = attention_to_random_symbols(subject.model, 2 * reach)
    curves = compute_curves(subject, captured, reach)
    columns = 2 if len(curves) in (2, 4) else 3  # no gap in the last row
    return draw_curves(curves, subject.heads, subject.title, columns)


def draw_distance(layers: Sequence[CapturedAttention], heads: Sequence[int], title: str) -> Any:
    """Draw the mean attention by distance, a panel for each layer and a line for each head.

    Pairs to which no head of the layer attends do not count. Returns matplotlib's Figure.
    """
    curves = []
    for layer in layers:
        seen = layer.weights.ne(0).any(1)
        means = mean_by_distance(layer.weights[:, list(heads)], seen)
        curves.append(Curves(f"layer {layer.layer + 1}", *means))
    return draw_curves(curves, heads, title, columns=2, height=2.8, y="mean attention")


@torch.no_grad()
def draw_products(subject: Subject, reach: int = 48) -> Any:
    """Draw products of input vectors: as they are, and after random and the model's projections.

    They are W_q p_t . W_k p_(t+k) of each head, for the middle position t and k from -reach to
    reach. The dot products of sinusoids depend only on the distance, and fall with it. After the
    projections to queries and keys they no longer do (Yan et al. 2019, "TENER", arXiv:1911.04474,
    section 3.2).

    Raises:
        UserError: the encoding adds no vectors at the input.
    """
    vectors = subject.compute_input_vectors()
    if vectors is None:
        raise UserError(
            f"{subject.spec} adds no vectors at the input, so it has no products to show"
        )
    reach, dims = subject.limit_reach(reach), subject.dims
    identity = torch.eye(dims.embed_dim)[None]  # of a single head that has all channels
    generator = torch.Generator().manual_seed(_SEED)
    size = (2, dims.num_heads, dims.head_dim, dims.embed_dim)
    query, key = torch.randn(size, generator=generator) * dims.embed_dim**-0.5
    projections = {"themselves": (identity, identity), "random projections": (query, key)}
    if subject.projections:
        for layer in subject.layers:
            projections[f"projections of layer {layer + 1}"] = subject.projections[layer]
    distances = torch.arange(-reach, reach + 1)
    middle = len(vectors) // 2
    around = vectors[middle - reach : middle + reach + 1]  # [R, C]
    curves = []
    for name, (query, key) in projections.items():
        keys = around @ key.transpose(1, 2)  # [H, R, D]
        products = torch.einsum("hd,hrd->hr", query @ vectors[middle], keys)
        shown = products if query is identity else products[subject.heads]
        curves.append(Curves(name, distances, shown))
    title = f"{subject.title}: products of input vectors at distance k"
    return draw_curves(curves, subject.heads, title, x="distance k", shared_name="all channels")


@torch.no_grad()
def draw_decay(subject: Subject, reach: int = 256) -> Any:
    """Draw the bound of rope's scores by distance: the mean of abs(S_1) .. abs(S_(d/2)).

    S_j is the sum of the first j phases e^(i m theta_t) of a distance m. The score of any query and
    key is at most this mean, times d/2, times the largest change from one pair of coordinates to
    the next (Su et al. 2021, "RoFormer", arXiv:2104.09864, 3.4.3).

    Raises:
        UserError: the encoding is not rope.
    """
    distances = torch.arange(reach + 1)
    rotation = subject.encodings[0].shared.rotation(make_positions(len(distances)).ids)
    if not isinstance(rotation, PairRotation) or rotation.decay is not None:
        raise UserError(f"{subject.spec} has no bound of decay; only rope has one")
    phases = rotation.phases[0].to(torch.complex128)  # [1, R, d/2]
    bound = phases.cumsum(-1).abs().mean(-1)  # [1, R]
    title = f"{subject.title}: decay with the distance"
    curve = Curves("bound of the score", distances, bound)
    return draw_curves([curve], [], title, height=3.0, x="distance", y="mean of |S_j|")


def draw_curves(
    curves: Sequence[Curves],
    heads: Sequence[int],
    title: str,
    columns: int = 3,
    height: float = 2.4,
    x: str = "distance j - i",
    y: str = "",
    shared_name: str = "all heads",
) -> Any:
    """Draw a panel for each of the curves, and a line for each of the ``heads``, by their indices.

    A line that is not one head's has the ``shared_name``; ``x`` and ``y`` label the axes.
    """
    figure, panels = grids.new_page(len(curves), title, columns, height)
    for axes, curve in zip(panels, curves):
        is_by_head = len(curve.values) == len(heads)
        names = [f"head {head + 1}" for head in heads] if is_by_head else [shared_name]
        for number, (name, row) in enumerate(zip(names, curve.values.detach().float())):
            style = pictures.line_style(number)
            axes.plot(curve.distances.numpy(), row.numpy(), lw=1.4, label=name, **style)
        axes.axvline(0, color=PALE, lw=0.8, zorder=0)
        axes.grid(axis="y", color=pictures.GRID, linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        grids.label_axes(axes, curve.title, x, y)
    lines, names = max(panels, key=lambda axes: len(axes.lines)).get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(lines, names, loc="outside lower center", ncols=8, fontsize=8)
    return figure
