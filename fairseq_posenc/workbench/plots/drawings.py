"""Draws the pictures of ``plot``: tables, maps of them, curves by distance, and attention.

A distance is j - i for query i and key j, so that later keys have positive distances. ``Any`` is a
Figure or Axes of matplotlib, which is optional: only functions that need it import it.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.encodings import term as term_types
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots.subject import Subject, make_positions
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.pictures import GRAY, PALE
from fairseq_posenc.workbench.results.record import group_by

WIDTH = 8.0  # of a picture, in inches
SIGNED, UNSIGNED = "PuOr", "cividis"  # color maps that color-blind people can read
POSITION, DISTANCE, CHANNEL = "position", "distance j - i", "channel"  # titles of axes
_MAX_PANELS = 48
_LINE_INCHES = 0.1  # height of a line of text
_MIN_SIZE = 3  # fewest rows, and columns, of a table that is drawn as a map


def new_page(count: int, title: str, columns: int, height: float) -> tuple[Any, list[Any]]:
    """Create a figure of panels in rows of up to ``columns``, ``height`` inches each.

    Raises:
        UserError: there are more panels than can be read.
    """
    if count > _MAX_PANELS:
        raise UserError(f"{count} panels are too many for a picture: choose with --layer or --head")
    columns = min(columns, count)
    size = WIDTH, math.ceil(count / columns) * height + 0.6  # the margin is for the title
    figure, panels = pictures.new_panels(count, columns, size, dpi=100)
    figure.suptitle(fill(title, 85), fontsize=11, x=0.01, ha="left")  # 85 characters fill `WIDTH`
    for axes in panels:
        axes.tick_params(labelsize=8, length=0, colors=GRAY)
    return figure, panels


def label_axes(axes: Any, title: str, x: str, y: str = "") -> None:
    """Write the titles of a panel and of its axes."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8, color=GRAY)
    axes.set_ylabel(y, fontsize=8, color=GRAY)


def draw_attention(
    attentions: Sequence[CapturedAttention],
    heads: Sequence[int],
    queries: Sequence[str],
    keys: Sequence[str],
    title: str,
) -> Any:
    """Draw attention maps, a row for each layer and a column for each head; return the Figure.

    Tokens are written if they fit; pairs to which no head of the layer attends are gray.

    Args:
        attentions: of the layers to show, to one sentence; weights are ``(1, H, T, S)``.
        heads: indices of the heads to show.
        queries: text of the T tokens that attend.
        keys: text of the S tokens attended to.
        title: of the figure.
    """
    from matplotlib import colormaps

    width = 0.8 * WIDTH / max(len(heads), 2)  # of a map; the rest is for texts and the color bar
    height = width * min(max(len(queries) / len(keys), 0.5), 1.5)  # neither too flat nor too tall
    count = len(attentions) * len(heads)
    figure, panels = new_page(count, title, len(heads), height + 0.9)  # room for the texts
    colors = colormaps[UNSIGNED].with_extremes(bad=PALE)
    limit = max(float(x.weights[0, list(heads)].max()) for x in attentions) or 1.0  # above 0
    for axes, (attention, head) in zip(panels, product(attentions, heads)):
        weights = attention.weights[0]  # [H, T, S]
        shown = weights[head].masked_fill(weights.eq(0).all(0), torch.nan)
        image = axes.imshow(shown.numpy(), cmap=colors, vmin=0.0, vmax=limit, aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_title(f"{attention.layer + 1}.{head + 1}", fontsize=9)
        axes.set(xticks=[], yticks=[])
        if head == heads[0] and len(queries) * _LINE_INCHES <= height:
            axes.set_yticks(range(len(queries)), queries, fontsize=7)
        if attention is attentions[-1] and len(keys) * _LINE_INCHES <= width:
            axes.set_xticks(range(len(keys)), keys, fontsize=7, rotation=90)
    figure.colorbar(image, ax=panels, shrink=0.85, label="attention (titles: layer.head)")
    return figure


class PlottedTable(NamedTuple):
    """A table of an encoding, with its title and the meaning of rows and columns."""

    title: str  # such as `query table, layer 1, head 2`
    values: Tensor  # `(rows, columns)`
    rows: Tensor  # position or distance of each row
    row_label: str  # such as `POSITION` or `DISTANCE`
    column_label: str  # such as `CHANNEL`
    heads: Sequence[str] = ()  # name of each column's head, `1` or `all`, if columns are heads


@torch.no_grad()
def collect_tables(subject: Subject) -> list[PlottedTable]:
    """Collect the tables of a stack's input, and of its layers and heads to show.

    A table that all layers or heads share appears once. Rows of clipped distances, which are equal,
    appear once at each end. A causal stack has no rows for later keys.

    Raises:
        UserError: the encodings have no tables.
    """
    tables = []
    if (vectors := subject.compute_input_vectors()) is not None:
        rows = torch.arange(len(vectors))
        tables = [PlottedTable("at the input", vectors, rows, POSITION, CHANNEL)]
    for layer, name in subject.named_layers.items():
        tables += _collect_term_tables(subject, layer, name)
    if not tables:
        raise UserError(f"{subject.title} has no table to show")
    return tables


def draw_tables(subject: Subject) -> Any:
    """Draw a heat map for each table, with white for 0; return matplotlib's Figure."""
    tables = collect_tables(subject)
    figure, panels = new_page(len(tables), subject.title, columns=4, height=2.4)
    for axes, table in zip(panels, tables):
        values = table.values.float().numpy()
        limit = float(abs(values).max()) or 1.0  # colors need a range, also for zeros
        top, bottom = int(table.rows[0]) - 0.5, int(table.rows[-1]) + 0.5  # edges of its rows
        extent = (-0.5, values.shape[1] - 0.5, bottom, top)
        style = {"cmap": SIGNED, "vmin": -limit, "vmax": limit}
        image = axes.imshow(values, extent=extent, aspect="auto", interpolation="nearest", **style)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.85)
        label_axes(axes, table.title, table.column_label, table.row_label)
        if table.heads:
            axes.set_xticks(range(len(table.heads)), table.heads)
    return figure


def place_rows(rows: Tensor) -> Tensor:
    """Compute points ``(rows, 2)`` whose distances are as close to those of the rows as possible.

    This is metric multidimensional scaling of Euclidean distances, from a fixed seed.
    """
    from sklearn.manifold import MDS  # only maps need it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of future versions
        scaling = MDS(n_components=2, n_init=4, max_iter=1000, eps=1e-9, random_state=0)
        return torch.from_numpy(scaling.fit_transform(rows.double().numpy()))


def draw_map(subject: Subject) -> Any:
    """Draw a map of each table, a line joining its rows in order; return matplotlib's Figure.

    Raises:
        UserError: no table has enough rows and columns.
    """
    tables = [table for table in collect_tables(subject) if min(table.values.shape) >= _MIN_SIZE]
    if not tables:
        raise UserError(f"a map needs {_MIN_SIZE} rows and columns; {subject.title} has fewer")
    title = f"{subject.title}: nearby points are similar rows"
    figure, panels = new_page(len(tables), title, columns=2, height=3.4)
    for axes, table in zip(panels, tables):
        points = place_rows(table.values).numpy()
        axes.plot(*points.T, color=PALE, lw=0.7, zorder=1)
        image = axes.scatter(*points.T, c=table.rows.numpy(), cmap=UNSIGNED, s=14, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xticks=[], yticks=[])
        axes.set_title(table.title, fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.85, label=table.row_label)
    return figure


def _collect_term_tables(subject: Subject, layer: int, layer_name: str) -> Iterator[PlottedTable]:
    """Yield the tables of a layer's terms, each tensor once."""
    distances, terms = subject.compute_terms(layer)  # [R], ascending, of the rows of tables
    visible = distances <= (0 if subject.dims.causal else distances[-1])  # [R]; causal: not later
    if (pairs := terms.find(term_types.NumbersByPair)) is not None:
        bias = pairs.numbers[0]  # [H or 1, T, S]
        queries = torch.arange(bias.size(1))
        titles = _title_heads(f"pair bias, {layer_name}", subject.shown_heads, len(bias) > 1)
        for head, name in titles.items():
            yield PlottedTable(name, bias[head], queries, "query's position", "key's position")
    by_distance = [term for term in terms if isinstance(term, term_types.ByDistance)]
    # Terms that share a table, as in the encoding m4, differ only in their names.
    for sharing in group_by(by_distance, lambda term: id(term.table)).values():
        term, label = sharing[0], " and ".join(term.name for term in sharing)
        title = f"{label.replace('_', ' ')}, {layer_name}"
        titles = _title_heads(title, subject.shown_heads, term.per_head)
        # [H or 1, R], or of vectors [H or 1, R, D], without the last two rows of a reset (as in
        # TUPE), which are for pairs with the first token at any distance.
        table = term.table[:, : len(distances)][:, visible]
        if isinstance(term, term_types.RowsByDistance):
            for head, name in titles.items():
                values, rows = _merge_equal_ends(table[head], distances[visible])
                yield PlottedTable(name, values, rows, DISTANCE, CHANNEL)
        else:  # numbers: heads are columns
            values, rows = _merge_equal_ends(table[list(titles)].T, distances[visible])
            names = [str(head + 1) for head in titles] if term.per_head else ["all"]
            yield PlottedTable(title, values, rows, DISTANCE, "head", names)
    if (counted := terms.find(term_types.CountedRows)) is not None:  # of CoPE
        table, title = counted.rows.detach(), f"counted table, {layer_name}"  # [P, D], of all heads
        yield PlottedTable(title, table, torch.arange(len(table)), "counted position", CHANNEL)


def _title_heads(title: str, heads: Sequence[int], per_head: bool) -> dict[int, str]:
    """Title the tables of heads, by index; or, if not ``per_head``, the only table, index 0."""
    return {x: f"{title}, head {x + 1}" for x in heads} if per_head else {0: title}


def _merge_equal_ends(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the equal rows at each end of a table to one row; keep all if all are equal."""
    changes = (values[1:] != values[:-1]).any(1).nonzero().flatten().tolist()
    kept = slice(changes[0], changes[-1] + 2) if changes else slice(None)  # rows i, i + 1 differ
    return values[kept], rows[kept]


class Curves(NamedTuple):
    """Values by distance in one layer, or in all layers if they share them."""

    title: str  # name of the values and of the layer
    distances: Tensor  # `(R,)` for R distances
    values: Tensor  # `(heads, R)`, or `(1, R)` if all heads share them


@torch.no_grad()
def compute_curves(subject: Subject, reach: int = 32) -> list[Curves]:
    """Compute scores by distance up to ``reach``, and the biases and gains in them.

    Biases are added to the product of query and key, gains multiply it. Scores are those of equal
    random contents (:meth:`~fairseq_posenc.api.PositionEncoding.distance_curve`).
    """
    reach, heads = subject.limit_reach(reach), subject.shown_heads
    shown = torch.arange(-reach, 1 if subject.dims.causal else reach + 1)  # causal: no later keys
    scores, term_curves = [], []
    for layer, name in subject.named_layers.items():
        equal = subject.by_layer[layer].distance_curve(reach)[heads]  # [heads, 2 reach + 1]
        scores.append(Curves(f"score of equal contents, {name}", shown, equal[:, : len(shown)]))
        distances, layer_terms = subject.compute_terms(layer)  # ascending; a column each, below
        for term in layer_terms:
            if isinstance(term, term_types.NumbersByDistance):
                values = term.table[heads if term.per_head else [0]][:, shown - distances[0]]
                term_curves.append(Curves(f"{term.name}, {name}", shown, values))
    return scores + term_curves


def draw_scores(subject: Subject) -> Any:
    """Draw a panel for each of the curves by distance, with a line for each head."""
    return draw_curves(compute_curves(subject), subject.shown_heads, subject.title)


@torch.no_grad()
def draw_products(subject: Subject, reach: int = 48) -> Any:
    """Draw products of input vectors: unprojected, projected at random, and by the model.

    They are W_q p_t . W_k p_(t+k) of each head, for the middle position t and k from -reach to
    reach. The dot products of sinusoids depend only on the distance, and fall with it. After the
    projections to queries and keys they no longer do (Yan et al. 2019, "TENER", arXiv:1911.04474,
    section 3.2).

    Raises:
        UserError: the encoding adds no vectors at the input.
    """
    if (vectors := subject.compute_input_vectors()) is None:
        raise UserError(f"{subject.title} adds no vectors at the input: nothing to multiply")
    reach, dims = subject.limit_reach(reach), subject.dims
    identity = torch.eye(dims.embed_dim)[None]  # of a single head that has all channels
    generator = torch.Generator().manual_seed(1)
    size = (2, dims.num_heads, dims.head_dim, dims.embed_dim)
    query, key = torch.randn(size, generator=generator) * dims.embed_dim**-0.5
    projections = {"input vectors": (identity, identity), "random projections": (query, key)}
    if subject.projections:
        for layer in subject.shown_layers:
            projections[f"projections of layer {layer + 1}"] = subject.projections[layer]
    middle = len(vectors) // 2
    around = vectors[middle - reach : middle + reach + 1]  # [R, C]
    curves = []
    for name, (query, key) in projections.items():
        keys = around @ key.transpose(1, 2)  # [H, R, D]
        products = torch.einsum("hd,hrd->hr", query @ vectors[middle], keys)  # [H, R]
        shown = products if query is identity else products[subject.shown_heads]
        curves.append(Curves(name, torch.arange(-reach, reach + 1), shown))
    title = f"{subject.title}: products of input vectors at distance k"
    return draw_curves(curves, subject.shown_heads, title, x="distance k")


@torch.no_grad()
def draw_decay(subject: Subject, reach: int = 256) -> Any:
    """Draw the bound on rope's scores by distance: the mean of abs(S_1) .. abs(S_(d/2)).

    S_j is the sum of the first j phases e^(i m theta_t) of a distance m. The score of any query and
    key is at most this mean, times d/2, times the largest change from one pair of coordinates to
    the next (Su et al. 2021, "RoFormer", arXiv:2104.09864, 3.4.3).

    Raises:
        UserError: no layer has rope.
    """
    curves = []  # one for each spec of a layer
    layers = [subject.by_layer[index] for index in subject.shown_layers]  # rope is in `shared`
    for spec, shared in {str(layer.spec): layer.shared for layer in layers}.items():
        rotation = shared.rotation(make_positions(reach + 1).ids)  # of positions 0 to reach
        if isinstance(rotation, PairRotation) and rotation.decay is None:  # xpos has a decay
            phases = rotation.phases[0].to(torch.complex128)  # [1 for all heads, R, d/2]
            bound = phases.cumsum(-1).abs().mean(-1)  # [1, R]
            curves.append(Curves(f"bound on the score, {spec}", torch.arange(reach + 1), bound))
    if not curves:
        raise UserError(f"{subject.title} has no bound on its decay; only rope has one")
    title = f"{subject.title}: decay with the distance"
    return draw_curves(curves, [], title, x="distance", y="mean of |S_j|")


def draw_curves(
    curves: Sequence[Curves],
    heads: Sequence[int],
    title: str,
    x: str = DISTANCE,
    y: str = "",
) -> Any:
    """Draw a panel for each of ``curves``; ``heads`` (indices), ``x`` and ``y`` only label them."""
    figure, panels = new_page(len(curves), title, columns=3, height=2.4)
    most_lines: list[Any] = []  # the lines of a panel that has the most
    for axes, curve in zip(panels, curves):
        # A line for each head, or a single one if all heads share the values.
        lines = axes.plot(curve.distances.numpy(), curve.values.detach().float().T.numpy(), lw=1.4)
        most_lines = max(most_lines, lines, key=len)
        axes.axvline(0, color=PALE, lw=0.8, zorder=0)
        axes.grid(axis="y", color=pictures.GRID, linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        label_axes(axes, curve.title, x, y)
    if len(most_lines) > 1:  # one legend for all panels
        names = [f"head {head + 1}" for head in heads]
        figure.legend(most_lines, names, loc="outside lower center", ncols=8, fontsize=8)
    return figure
