"""The tables of results that the papers report, by name."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.training import recipes

Figure = tuple[str, str, Optional[str]]  # task, metric, split

# By the paper's own number or, where a figure or the text has the numbers, by that.
TABLES = {
    **{"A1": "m4m_table1", "A-loss": "m4m_losses", "A2": "m4m_table2", "A-raffel": "m4m_raffel"},
    **{f"A{number}": f"m4m_table{number}" for number in range(3, 8)},
    **{f"B{number}": f"decbert_table{number}" for number in range(1, 5)},
    **{"B-figure2": "decbert_figure2", "B-figure4": "decbert_figure4", "C": "fr_en"},
}


class Reported(NamedTuple):
    """A paper's table."""

    id: str  # as in `A2`
    title: str  # what it is about
    source: str  # key of the paper in `sources`
    where: str  # in the paper
    recipe: str  # the set-up of its models
    columns: dict[str, Figure]  # what each shows, by name
    digits: dict[str, int]  # how many a figure has after the point, by column
    rows: list[dict[str, Any]]  # in the paper's order, as `recipes.json` has them
    note: str  # what a reader has to know of the figures


@cache
def reported() -> dict[str, Reported]:
    """Return all tables by their short names."""
    return {name: _table(name, recipes.load()["reported"][key]) for name, key in TABLES.items()}


def _table(name: str, entry: dict[str, Any]) -> Reported:
    columns = entry["columns"].items()
    return Reported(
        id=name,
        **{key: entry[key] for key in ("title", "source", "where", "recipe", "rows")},
        columns={column: (x["task"], x["metric"], x["split"]) for column, x in columns},
        digits={column: each.get("digits", 2) for column, each in columns},
        note=entry.get("note", ""),
    )
