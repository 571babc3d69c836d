"""Pictures of tables, which have a row for each position or distance: heat maps, 2-D maps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.encodings.terms import Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.stacks import PlottedStack, compute_terms
from fairseq_posenc.workbench.results.pictures import GRID

_FEWEST_ROWS, _MOST_MAPS = 3, 16
_SEED = 0
POSITION, DISTANCE, CHANNEL = "position", "distance j - i", "channel"


class PlottedTable(NamedTuple):
    """A matrix of numbers to be drawn, as a picture or as curves."""

    title: str  # such as `query table, layer 1, head 2`
    values: Tensor  # `(rows, columns)`
    rows: Tensor  # the position or distance of each row
    columns: Sequence[int]  # the number of each column
    row_label: str  # such as `POSITION` or `DISTANCE`
    column_label: str  # such as `CHANNEL`


@torch.no_grad()
def collect_tables(
    stack: PlottedStack, layers: Sequence[int], heads: Sequence[int]
) -> list[PlottedTable]:
    """Collect the tables of a stack's input, and those of its layers and heads, counted from 0.

    What all layers, or all heads, share is there once. Where distances are clipped, one row stands
    for all beyond. A causal stack has no rows of later keys.

    Raises:
        UserError: the encodings have no tables.
    """
    tables = []
    if (vectors := stack.compute_input_vectors()) is not None:
        rows, columns = torch.arange(len(vectors)), range(vectors.size(1))
        tables = [PlottedTable("at the input", vectors, rows, columns, POSITION, CHANNEL)]
    for layer in layers if stack.has_own_encodings else layers[:1]:
        tables += _collect_term_tables(stack, layer, heads)
    if not tables:
        raise UserError(f"{stack.spec} has no table to show")
    return tables


def subtract_tables(
    tables: Sequence[PlottedTable], others: Sequence[PlottedTable]
) -> list[PlottedTable]:
    """Subtract the tables of another model.

    Raises:
        UserError: the models have other tables, or of other sizes.
    """
    ours, theirs = (
        [f"{table.title} ({' x '.join(map(str, table.values.shape))})" for table in of_model]
        for of_model in (tables, others)
    )
    if ours != theirs:
        raise UserError(
            f"the models have different tables: {'; '.join(ours)} and {'; '.join(theirs)}: choose "
            "two with the same positions and sizes"
        )
    return [
        table._replace(values=table.values - other.values) for table, other in zip(tables, others)
    ]


def draw_tables(tables: Sequence[PlottedTable], title: str) -> Any:
    """Draw a Figure with a heat map for each table; white is 0.

    Raises:
        UserError: there are too many for a picture.
    """
    _refuse_many(tables, grids.MOST)
    figure, panels = grids.new_panels(len(tables), title, columns=4, ratio=1.2)
    for axes, table in zip(panels, tables):
        low, high, width = int(table.rows[0]), int(table.rows[-1]), len(table.columns)
        image = grids.draw_heat_map(
            axes, table.values, extent=(-0.5, width - 0.5, high + 0.5, low - 0.5)
        )
        grids.draw_scale(figure, image, axes)
        grids.label_axes(axes, table.title, table.column_label, table.row_label)
        if table.column_label == "head":
            axes.set_xticks(range(width), [str(head) for head in table.columns])
    return figure


def place_rows(rows: Tensor) -> Tensor:
    """Place points ``(rows, 2)`` whose distances are, as far as they can, those of the rows.

    Metric multidimensional scaling of Euclidean distances, from a fixed seed.

    Raises:
        UserError: scikit-learn is missing.
    """
    try:
        from sklearn.manifold import MDS
    except ImportError:
        raise UserError("maps need scikit-learn: pip install 'fairseq-posenc[plot]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of its next versions
        scaling = MDS(n_components=2, n_init=4, max_iter=1000, eps=1e-9, random_state=_SEED)
        return torch.from_numpy(scaling.fit_transform(rows.detach().double().numpy()))


def draw_map(tables: Sequence[PlottedTable], title: str) -> Any:
    """Draw a Figure with a map of each table, its rows in order joined by a line.

    Raises:
        UserError: no table has rows enough, or there are too many tables.
    """
    tables = [table for table in tables if min(table.values.shape) >= _FEWEST_ROWS]
    if not tables:
        raise UserError("a map needs a table of vectors, and there is only one of numbers")
    _refuse_many(tables, _MOST_MAPS)
    figure, panels = grids.new_panels(len(tables), title, columns=2, ratio=0.85)
    for axes, table in zip(panels, tables):
        points = place_rows(table.values).numpy()
        axes.plot(*points.T, color=grids.PALE, lw=0.7, zorder=1)
        image = axes.scatter(*points.T, c=table.rows.numpy(), cmap=grids.AMOUNTS, s=14, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(GRID)
        axes.set_title(table.title, fontsize=9)
        grids.draw_scale(figure, image, axes, table.row_label)
    return figure


def _refuse_many(tables: Sequence[PlottedTable], most: int) -> None:
    if len(tables) > most:
        raise UserError(f"{len(tables)} tables are too many for a picture: choose --layer, --head")


def _collect_term_tables(
    stack: PlottedStack, layer: int, heads: Sequence[int]
) -> Iterator[PlottedTable]:
    span, terms = compute_terms(stack.layers[layer], stack.dims.max_positions)
    distances = span.distances()
    seen = distances <= (0 if stack.dims.causal else span.high)
    named: dict[int, tuple[list[str], Term, Tensor]] = {}
    for name, term, tensor in terms.given():  # m4's query and key table are one
        named.setdefault(id(tensor), ([], term, tensor))[0].append(name.replace("_", " "))
    for names, term, tensor in named.values():
        title = f"{' and '.join(names)}, {stack.name_layer(layer)}"
        if term.rows is None:
            queries, keys = torch.arange(tensor.size(-2)), range(tensor.size(-1))
            per_head = term.per_head(tensor)
            for head in heads if per_head else [0]:
                name, values = f"{title}, head {head + 1}" if per_head else title, tensor[0, head]
                labels = ("query's position", "key's position")
                yield PlottedTable(name, values, queries, keys, *labels)
            continue
        tensor = tensor.narrow(term.rows, 0, len(distances))  # rows of a reset come after
        for name, values, columns in _split_table(term, tensor, heads, title):
            kept, rows = _merge_equal_ends(values[seen], distances[seen])
            column_label = CHANNEL if term.has_vectors else "head"
            yield PlottedTable(name, kept, rows, columns, DISTANCE, column_label)
    if (counted := terms.counted_table) is not None:
        rows, columns = torch.arange(len(counted)), range(counted.size(1))
        title = f"counted table, {stack.name_layer(layer)}"
        yield PlottedTable(title, counted, rows, columns, "counted position", CHANNEL)


def _split_table(
    term: Term, tensor: Tensor, heads: Sequence[int], title: str
) -> Iterator[tuple[str, Tensor, Sequence[int]]]:
    """Yield title, rows by distance, and columns, which are heads where a row is a number."""
    if not term.has_vectors:
        chosen = list(heads) if term.per_head(tensor) else [0]
        yield title, tensor[chosen].T, [head + 1 for head in chosen]
    elif not term.per_head(tensor):
        yield title, tensor.flatten(end_dim=-2), range(tensor.size(-1))
    else:
        for head in heads:
            yield f"{title}, head {head + 1}", tensor[head], range(tensor.size(-1))


def _merge_equal_ends(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the ends of a table where all rows are equal down to one row each."""
    changes = (values[1:] != values[:-1]).any(1).nonzero().flatten().tolist()
    kept = slice(changes[0], changes[-1] + 2) if changes else slice(None)
    return values[kept], rows[kept]
