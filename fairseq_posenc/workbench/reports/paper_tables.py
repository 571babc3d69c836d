"""Places a user's runs in the rows of the papers' tables of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc import specs
from fairseq_posenc.analysis.catalogue import count_at_base_size
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import format_directions
from fairseq_posenc.workbench.reports.deviations import list_deviations
from fairseq_posenc.workbench.reports.own_runs import TRANSLATION, OwnRun
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training.recipes import TABLES, Figure, Reported, reported

# Settings in which trainings may differ and still count as seeds of the same model.
_OF_ONE_RUN = {"seed", "save_dir", "restore_file", "tensorboard_logdir", "log_file"}
_OF_ONE_RUN |= {"wandb_project"}
# Columns, in order of preference, by which the best of several trainings is chosen.
_BEST_BY = {"valid loss": min, "BLEU": max}


class BestRun(NamedTuple):
    """The best of several trainings that differ only by seed."""

    model: list[OwnRun]  # its runs
    trainings: int  # number of trainings
    column: str  # column by which it is the best


class PaperRow(NamedTuple):
    """A row of a paper's table, with the user's models that belong to it."""

    name: str  # the paper's name of the row
    encoding: str  # spec of its positions
    paper: dict[str, float]  # the paper's figures by column
    texts: dict[str, str]  # the paper's cells that contain text, by column
    computed: dict[str, float]  # our figures that need no run, by column
    models: list[list[OwnRun]]  # runs of each model of the user
    best: list[BestRun]  # best runs over seeds, if the paper reports the best


class PaperTable(NamedTuple):
    """A paper's table, with the user's runs in its rows."""

    paper: Reported
    rows: list[PaperRow]

    @property
    def runs(self) -> list[OwnRun]:
        """All runs of the table."""
        return [run for row in self.rows for model in row.models for run in model]

    def select_figures(self, model: Sequence[OwnRun]) -> dict[str, float]:
        """Select the figures of a model, given as its runs, by column."""
        figures = {key: value for run in model for key, value in run.figures.items()}
        columns = self.paper.columns.items()
        selected = {name: figures[key] for name, key in columns if key in figures}
        others = [name for name, key in columns if key[0] != "average"]
        if selected.keys() >= set(others):
            average = statistics.fmean(selected[name] for name in others)
            selected |= {name: average for name, key in columns if key[0] == "average"}
        return selected


def collect(
    runs: Sequence[OwnRun], selection: Optional[str]
) -> tuple[list[PaperTable], list[OwnRun]]:
    """Place the runs in the tables; return the tables and the runs that fit in no table.

    Args:
        runs: the runs.
        selection: names of tables, as in ``A2,B3``, or ``all``; None for all that have a run.

    Raises:
        UserError: an unknown table.
    """
    is_all = selection in (None, "all")
    names = list(TABLES) if is_all else [name.strip() for name in str(selection).split(",")]
    for name in names:
        if name not in TABLES:
            choices = ", ".join(TABLES)
            raise UserError(f"--tables {selection}: unknown table {name!r}: choose from {choices}")
    tables = {name: _build_table(paper, runs) for name, paper in reported().items()}
    placed = {id(run) for table in tables.values() for run in table.runs}
    unmatched = [run for run in runs if id(run) not in placed]
    return [tables[name] for name in names if selection or tables[name].runs], unmatched


def _build_table(paper: Reported, runs: Sequence[OwnRun]) -> PaperTable:
    released, columns = any("released" in row for row in paper.rows), set(paper.columns.values())
    table = PaperTable(paper, [])
    for row in paper.rows:
        criteria = {"recipe": paper.recipe, "released": False if released else None, **row}
        by_model: dict[str, list[OwnRun]] = {}
        for run in runs:
            if columns & run.figures.keys() and _belongs_to_row(run, criteria):
                by_model.setdefault(run.model, []).append(run)
        models, spec = list(by_model.values()), row["position_encoding"]
        computed = {
            column: count_at_base_size(spec) / 1000
            for column, figure in paper.columns.items()
            if figure[0] == "parameters"
        }
        texts = row.get("texts", {})
        best = _find_best(table, models) if paper.recipe == TRANSLATION else []
        table.rows.append(PaperRow(row["name"], spec, row["values"], texts, computed, models, best))
    return table


def _find_best(table: PaperTable, models: Sequence[list[OwnRun]]) -> list[BestRun]:
    """Find the best of each group of trainings that differ only by seed."""
    groups: dict[str, list[list[OwnRun]]] = {}
    for model in models:
        training = next((run.training for run in model if run.training is not None), None)
        if training is not None:
            shared = {k: v for k, v in training.settings.items() if k not in _OF_ONE_RUN}
            groups.setdefault(repr(sorted(shared.items(), key=str)), []).append(model)
    best = []
    for group in groups.values():
        figures = [table.select_figures(model) for model in group]
        column = next((name for name in _BEST_BY if all(row.get(name) for row in figures)), None)
        if len(group) > 1 and column is not None:
            index = _BEST_BY[column](range(len(group)), key=lambda n: figures[n][column])
            best.append(BestRun(group[index], len(group), column))
    return best


def _belongs_to_row(run: OwnRun, row: dict[str, Any]) -> bool:
    """Check whether a run has the recipe, encoding, directions and release status of a row."""
    if run.recipe != row["recipe"] or run.encoding is None:
        return False
    if specs.parse(run.encoding) != specs.parse(row["position_encoding"]):
        return False
    is_released = run.training is not None and run.training.is_released
    if row["released"] not in (None, is_released):
        return False
    ours, papers = (
        format_directions([part.strip() for part in (text or "").split(",")])
        for text in (run.directions, row.get("attention_directions"))
    )
    return ours == papers and (run.directions is not None or "attention_directions" not in row)


def explain_absence(run: OwnRun) -> str:
    """Explain why a run belongs to no row: what the tables of its recipe lack."""
    tables = [paper for paper in reported().values() if paper.recipe == run.recipe]
    if not tables:
        return f"no table has the recipe {run.recipe}"
    if run.encoding is None:
        return "its positions are not known"
    with_row = [
        paper
        for paper in tables
        if any(
            _belongs_to_row(run, {"recipe": run.recipe, **row, "released": None})
            for row in paper.rows
        )
    ]
    names = ", ".join(paper.id for paper in with_row or tables)
    if not with_row:
        return f"{names}: no row has {run.encoding} with its directions"
    figures = ", ".join(format_figure(figure) for figure in run.figures) or "no figures"
    return f"{names}: no column for {figures}"


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
            {
                **_describe_run(run),
                "figures": {format_figure(k): v for k, v in run.figures.items()},
                "why": explain_absence(run),
            }
            for run in others
        ],
        "records": [{"path": str(path), **record._asdict()} for path, record in records.items()],
    }


def _build_row(table: PaperTable, row: PaperRow) -> dict[str, Any]:
    best = {id(best_run.model): {"best_of": best_run.trainings} for best_run in row.best}
    ours = [
        {
            **best.get(id(model), {}),
            "runs": [_describe_run(run) for run in model],
            "values": table.select_figures(model),
            "differences": list_deviations(model, model[0].recipe),
        }
        for model in row.models
    ]
    return {
        "name": row.name,
        "encoding": row.encoding,
        "paper": row.paper,
        "ours": ours,
        "paper_texts": row.texts,
        "computed": row.computed,
    }


def _describe_run(run: OwnRun) -> dict[str, Any]:
    names = ("name", "kind", "recipe", "encoding", "directions", "notes")
    return {**{name: getattr(run, name) for name in names}, "path": str(run.path)}


def format_figure(figure: Figure) -> str:
    """Join the words of a figure: its task, metric and split."""
    return " ".join(part for part in figure if part)
