"""Maps of tables in two dimensions, in which near rows are alike; needs scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.tables import Table

_FEWEST, _MOST = 3, 16
_SEED = 0


def placed(rows: Tensor) -> Tensor:
    """Return points ``(rows, 2)`` whose distances are, as far as they can, those of the rows.

    Metric multidimensional scaling of Euclidean distances, from a fixed seed.

    Args:
        rows: ``(rows, columns)``.

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


def draw_map(tables: Sequence[Table], title: str) -> Any:
    """Return a Figure with a map of each table, its rows in order joined by a line.

    Raises:
        UserError: no table has rows enough, or there are too many tables.
    """
    tables = [table for table in tables if min(table.values.shape) >= _FEWEST]
    if not tables:
        raise UserError("no table has rows of several numbers, which a map could place")
    if len(tables) > _MOST:
        raise UserError(f"{len(tables)} tables are too many for a picture: choose --layer, --head")
    figure, panels = grids.new(len(tables), title, columns=2, ratio=0.85)
    for axes, table in zip(panels, tables):
        points = placed(table.values).numpy()
        axes.plot(*points.T, color=grids.PALE, lw=0.7, zorder=1)
        image = axes.scatter(*points.T, c=table.rows.numpy(), cmap=grids.AMOUNTS, s=14, zorder=2)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(grids.GRID)
        axes.set_title(table.title, fontsize=9)
        grids.scale(figure, image, axes, table.of_rows)
    return figure
