"""The papers' tables of results, with the runs that belong to their rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc import specs
from fairseq_posenc.analysis.catalogue import count_at_base_size
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.reports.deviations import list_differences
from fairseq_posenc.workbench.reports.own_runs import TRANSLATION, OwnRun
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training.recipes import TABLES, Figure, Reported, reported

# Settings of a training that say which of several alike it is, and where it lies.
_OF_ONE_RUN = {
    "seed",
    "save_dir",
    "restore_file",
    "tensorboard_logdir",
    "log_file",
    "wandb_project",
}
# What the best of several trainings is found by, where the paper reports that one.
_BEST_BY = {"valid loss": min, "BLEU": max}


class BestRun(NamedTuple):
    """The best of trainings that differ by seed alone, as the paper reports it."""

    model: list[OwnRun]  # its runs
    trainings: int  # number of them
    column: str  # what it is the best by


class PaperRow(NamedTuple):
    """A row of a paper's table, and our models in its place."""

    name: str  # the paper's name
    encoding: str  # spec of its positions
    paper: dict[str, float]  # the paper's figures by column
    texts: dict[str, str]  # the paper's cells that are text, by column
    computed: dict[str, float]  # our figures that need no run, by column
    models: list[list[OwnRun]]  # runs of each of our models
    best: list[BestRun]  # of trainings that differ by seed, where the paper reports the best


class PaperTable(NamedTuple):
    """A paper's table, and our runs in its rows."""

    paper: Reported
    rows: list[PaperRow]

    @property
    def runs(self) -> list[OwnRun]:
        """All runs of the table."""
        return [run for row in self.rows for model in row.models for run in model]

    def select_figures(self, model: Sequence[OwnRun]) -> dict[str, float]:
        """Select the figures of one of our models by column."""
        figures = {key: value for run in model for key, value in run.figures.items()}
        selected = {
            name: figures[key] for name, key in self.paper.columns.items() if key in figures
        }
        others = [name for name, key in self.paper.columns.items() if key[0] != "average"]
        for name in self.paper.columns.keys() - set(others):
            if all(other in selected for other in others):
                selected[name] = statistics.fmean(selected[other] for other in others)
        return selected


def collect(runs: Sequence[OwnRun], wanted: Optional[str]) -> tuple[list[PaperTable], list[OwnRun]]:
    """Place the runs in the tables; return the tables and the runs that belong to none.

    ``wanted`` is as in ``A2,B3``, or ``all``; None for all tables with a figure of ours.

    Raises:
        UserError: there is no such table.
    """
    every = wanted in (None, "all")
    names = list(TABLES) if every else [name.strip() for name in str(wanted).split(",")]
    for name in names:
        if name not in TABLES:
            raise UserError(
                f"--tables {wanted}: unknown table {name!r}: choose from {', '.join(TABLES)}"
            )
    tables = {name: _build_table(paper, runs) for name, paper in reported().items()}
    placed = {id(run) for table in tables.values() for run in table.runs}
    others = [run for run in runs if id(run) not in placed]
    chosen = [tables[name] for name in names if wanted or tables[name].runs]
    return chosen, others


def _build_table(paper: Reported, runs: Sequence[OwnRun]) -> PaperTable:
    released = any("released" in row for row in paper.rows)
    rows = []
    for row in paper.rows:
        wanted = {"recipe": paper.recipe, "released": False if released else None, **row}
        models = _group_by_model(wanted, set(paper.columns.values()), runs)
        spec = row["position_encoding"]
        computed = {
            column: count_at_base_size(spec) / 1000
            for column, figure in paper.columns.items()
            if figure[0] == "parameters"
        }
        texts = row.get("texts", {})
        best = _find_best(paper, models) if paper.recipe == TRANSLATION else []
        rows.append(PaperRow(row["name"], spec, row["values"], texts, computed, models, best))
    return PaperTable(paper, rows)


def _find_best(paper: Reported, models: Sequence[list[OwnRun]]) -> list[BestRun]:
    """Find the best of each group of trainings that differ by seed alone."""
    groups: dict[str, list[list[OwnRun]]] = {}
    for model in models:
        training = next((run.training for run in model if run.training is not None), None)
        if training is not None:
            known = {k: v for k, v in training.settings.items() if k not in _OF_ONE_RUN}
            groups.setdefault(repr(sorted(known.items(), key=str)), []).append(model)
    found = []
    for group in groups.values():
        column = next(
            (name for name in _BEST_BY if all(_figure(paper, each, name) for each in group)), None
        )
        if len(group) > 1 and column is not None:
            best = _BEST_BY[column](group, key=lambda each: _figure(paper, each, column) or 0.0)
            found.append(BestRun(best, len(group), column))
    return found


def _figure(paper: Reported, model: Sequence[OwnRun], column: str) -> Optional[float]:
    return PaperTable(paper, []).select_figures(model).get(column)


def _group_by_model(
    row: dict[str, Any], columns: set[Figure], runs: Sequence[OwnRun]
) -> list[list[OwnRun]]:
    """Group the runs that belong to a row by model."""
    models: dict[str, list[OwnRun]] = {}
    for run in runs:
        if columns & run.figures.keys() and _belongs_to_row(run, row):
            models.setdefault(run.model, []).append(run)
    return list(models.values())


def _belongs_to_row(run: OwnRun, row: dict[str, Any]) -> bool:
    """Whether a run has the recipe, encoding and directions of a row, released or not."""
    if run.recipe != row["recipe"] or run.encoding is None:
        return False
    if specs.parse(run.encoding) != specs.parse(row["position_encoding"]):
        return False
    is_released = run.training is not None and run.training.is_released
    if row["released"] not in (None, is_released):
        return False
    if "attention_directions" not in row:
        return not _split_directions(run.directions or "")
    known = run.directions is not None
    return known and _split_directions(run.directions or "") == _split_directions(
        row["attention_directions"]
    )


def _split_directions(text: str) -> tuple[str, ...]:
    """Split directions; drop those at the end that are ``both``, the default."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    while parts and parts[-1] == "both":
        parts.pop()
    return tuple(parts)


def build_report(
    tables: Sequence[PaperTable], others: Sequence[OwnRun], records: Mapping[Path, Record]
) -> dict[str, Any]:
    """Build the report's JSON values."""
    return {
        "tables": [
            {
                "id": table.paper.id,
                "title": table.paper.title,
                "columns": list(table.paper.columns),
                "rows": [_build_row(table, row) for row in table.rows],
                "note": table.paper.note,
            }
            for table in tables
        ],
        "others": [
            {**_describe_run(run), "figures": {format_figure(k): v for k, v in run.figures.items()}}
            for run in others
        ],
        "records": [{"path": str(path), **each._asdict()} for path, each in records.items()],
    }


def _build_row(table: PaperTable, row: PaperRow) -> dict[str, Any]:
    best = {id(each.model): each for each in row.best}
    ours = [
        {
            **({"best_of": best[id(model)].trainings} if id(model) in best else {}),
            "runs": [_describe_run(run) for run in model],
            "values": table.select_figures(model),
            "differences": list_differences(model, model[0].recipe),
        }
        for model in row.models
    ]
    known = {"name": row.name, "encoding": row.encoding, "paper": row.paper, "ours": ours}
    return {**known, "paper_texts": row.texts, "computed": row.computed}


def _describe_run(run: OwnRun) -> dict[str, Any]:
    names = ("name", "kind", "recipe", "encoding", "directions", "notes")
    return {**{name: getattr(run, name) for name in names}, "path": str(run.path)}


def format_figure(figure: Figure) -> str:
    """Join the words of a figure: its task, metric and split."""
    return " ".join(part for part in figure if part)
