"""Draws tables that have a row for each position or distance, as heat maps or maps in 2-D.

``Any`` stands for matplotlib's Figure, which is optional.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.encodings.term import ByDistance, CountedRows, NumbersByPair, RowsByDistance
from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.subject import Subject
from fairseq_posenc.workbench.results.pictures import PALE

_MIN_SIZE = 3  # fewest rows, and columns, of a table that is drawn as a map
_MAX_MAPS = 16  # in a picture
_SEED = 0
POSITION, DISTANCE, CHANNEL = "position", "distance j - i", "channel"


class PlottedTable(NamedTuple):
    """A table of an encoding, with its title and the meaning of rows and columns."""

    title: str  # such as `query table, layer 1, head 2`
    values: Tensor  # `(rows, columns)`
    rows: Tensor  # position or distance of each row
    columns: Sequence[int]  # number of each column
    row_label: str  # such as `POSITION` or `DISTANCE`
    column_label: str  # such as `CHANNEL`


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
        rows, columns = torch.arange(len(vectors)), range(vectors.size(1))
        tables = [PlottedTable("at the input", vectors, rows, columns, POSITION, CHANNEL)]
    for layer in subject.different_layers:
        tables += _collect_term_tables(subject, layer)
    if not tables:
        raise UserError(f"{subject.spec} has no table to show")
    return tables


def draw_tables(subject: Subject) -> Any:
    """Draw a heat map for each table, with white for 0; return matplotlib's Figure."""
    tables = collect_tables(subject)
    figure, panels = grids.new_page(len(tables), subject.title, columns=4, height=2.4)
    for axes, table in zip(panels, tables):
        limit = float(table.values.abs().max()) or 1.0  # colours need a range, also for zeros
        left, top = -0.5, int(table.rows[0]) - 0.5
        extent = (left, len(table.columns) - 0.5, int(table.rows[-1]) + 0.5, top)
        image = axes.imshow(
            table.values.float().numpy(),
            cmap=grids.SIGNED,
            vmin=-limit,
            vmax=limit,
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.85)
        grids.label_axes(axes, table.title, table.column_label, table.row_label)
        if table.column_label == "head":
            axes.set_xticks(range(len(table.columns)), [str(head) for head in table.columns])
    return figure


def place_rows(rows: Tensor) -> Tensor:
    """Compute points ``(rows, 2)`` whose distances are as close to those of the rows as possible.

    This is metric multidimensional scaling of Euclidean distances, from a fixed seed.

    Raises:
        UserError: scikit-learn is missing.
    """
    try:
        from sklearn.manifold import MDS
    except ImportError:
        raise UserError(f"maps need scikit-learn: {how_to_install('plot')}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of future versions
        scaling = MDS(n_components=2, n_init=4, max_iter=1000, eps=1e-9, random_state=_SEED)
        return torch.from_numpy(scaling.fit_transform(rows.double().numpy()))


def draw_map(subject: Subject) -> Any:
    """Draw a map of each table, a line joining its rows in order; return matplotlib's Figure.

    Raises:
        UserError: no table has enough rows.
    """
    tables = [table for table in collect_tables(subject) if min(table.values.shape) >= _MIN_SIZE]
    if not tables:
        raise UserError("a map needs a table of vectors; the encodings have tables of numbers only")
    title = f"{subject.title}: near rows are alike"
    figure, panels = grids.new_page(len(tables), title, columns=2, height=3.4, most=_MAX_MAPS)
    for axes, table in zip(panels, tables):
        points = place_rows(table.values).numpy()
        axes.plot(*points.T, color=PALE, lw=0.7, zorder=1)
        image = axes.scatter(*points.T, c=table.rows.numpy(), cmap=grids.UNSIGNED, s=14, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xticks=[], yticks=[])
        axes.set_title(table.title, fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.85, label=table.row_label)
    return figure


def _collect_term_tables(subject: Subject, layer: int) -> Iterator[PlottedTable]:
    """Yield the tables of a layer's terms, each tensor once."""
    span, terms = subject.compute_terms(layer)
    distances = span.distances()
    visible = distances <= (0 if subject.dims.causal else span.high)
    by_tensor: dict[int, tuple[list[str], ByDistance | NumbersByPair, Tensor]] = {}
    for term in terms:  # they may share a tensor, as m4's do
        if isinstance(term, (ByDistance, NumbersByPair)):
            (tensor,) = term.tensors().values()
            by_tensor.setdefault(id(tensor), ([], term, tensor))[0].append(term.name)
    for names, term, tensor in by_tensor.values():
        title = f"{' and '.join(names).replace('_', ' ')}, {subject.name_layer(layer)}"
        shown = {0: title}  # title by head; all heads may share a table
        if term.per_head if isinstance(term, ByDistance) else tensor.size(1) > 1:
            shown = {head: f"{title}, head {head + 1}" for head in subject.heads}
        if not isinstance(term, ByDistance):  # a number for each pair, `(1, H or 1, T, S)`
            queries, keys = torch.arange(tensor.size(-2)), range(tensor.size(-1))
            labels = ("query's position", "key's position")
            for head, name in shown.items():
                yield PlottedTable(name, tensor[0, head], queries, keys, *labels)
            continue
        tensor = tensor.narrow(term.rows_dim, 0, len(distances))  # without the rows of a reset
        has_vectors = isinstance(term, RowsByDistance)
        if not has_vectors:  # `(H or 1, R)`: heads are columns
            split = {title: tensor[list(shown)].T}
        elif term.per_head:  # `(H, R, D)`
            split = {name: tensor[head] for head, name in shown.items()}
        else:
            split = {title: tensor.flatten(end_dim=-2)}
        for name, values in split.items():
            kept, rows = _merge_equal_ends(values[visible], distances[visible])
            columns = range(values.size(-1)) if has_vectors else [head + 1 for head in shown]
            label = CHANNEL if has_vectors else "head"
            yield PlottedTable(name, kept, rows, columns, DISTANCE, label)
    if (counted := terms.find(CountedRows)) is not None:  # CoPE's, by the number of tokens
        table, title = counted.rows.detach(), f"counted table, {subject.name_layer(layer)}"
        rows, columns = torch.arange(len(table)), range(table.size(1))
        yield PlottedTable(title, table, rows, columns, "counted position", CHANNEL)


def _merge_equal_ends(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the equal rows at each end of a table to one row."""
    changes = (values[1:] != values[:-1]).any(1).nonzero().flatten().tolist()
    kept = slice(changes[0], changes[-1] + 2) if changes else slice(None)
    return values[kept], rows[kept]
