"""Places a user's runs in the rows of the papers' tables of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc import specs
from fairseq_posenc.analysis.catalogue import count_at_base_size
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import format_directions
from fairseq_posenc.workbench.reports.deviations import list_deviations
from fairseq_posenc.workbench.reports.user_runs import UserRun, find_training
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training.recipes import TRANSLATION, Figure, PaperTable, load_tables

# Settings in which trainings may differ and still count as seeds of the same model.
_DIFFER_BY_SEED = {"seed", "save_dir", "restore_file"}
_DIFFER_BY_SEED |= {"tensorboard_logdir", "log_file", "wandb_project"}
# Columns, in order of preference, by which the best of several trainings is chosen.
_BEST_BY = {"valid loss": min, "BLEU": max}


def build_report(
    runs: Sequence[UserRun], records: Mapping[Path, Record], selection: Optional[str]
) -> dict[str, Any]:
    """Build the report, in the values that ``--json`` prints.

    Args:
        runs: the user's runs.
        records: the records of the user, of any command, by file.
        selection: names of tables, as in ``A2,B3``, or ``all``; None for all that have a run.

    Returns:
        ``tables`` with the runs in their rows, ``others`` (the runs that fit in no row) and
        ``records``.

    Raises:
        UserError: an unknown table.
    """
    tables = load_tables()
    names = list(tables)
    if selection not in (None, "all"):
        names = [name.strip() for name in selection.split(",")]
    for name in names:
        if name not in tables:
            choices = ", ".join(tables)
            raise UserError(f"--tables {selection}: unknown table {name!r}: choose from {choices}")
    # By table, a list of runs for each row.
    matches = {name: _match_runs(paper, runs) for name, paper in tables.items()}
    # By identity, because a run has no hash.
    placed = {id(run) for rows in matches.values() for row_runs in rows for run in row_runs}
    return {
        "tables": [
            _build_table(tables[name], matches[name])
            for name in names
            if selection or any(matches[name])
        ],
        "others": [
            {
                **_describe_run(run),
                "figures": {_format_figure(key): value for key, value in run.figures.items()},
                "why": _explain_absence(run),
            }
            for run in runs
            if id(run) not in placed
        ],
        "records": [{"path": str(path), **vars(record)} for path, record in records.items()],
    }


def _match_runs(paper: PaperTable, runs: Sequence[UserRun]) -> list[list[UserRun]]:
    """Find the runs of each row that have a figure in one of the table's columns."""
    columns = set(paper.columns.values())
    runs = [run for run in runs if columns & run.figures.keys()]
    matches = [[run for run in runs if _belongs_to_row(run, paper, row)] for row in paper.rows]
    if not any("released" in row for row in paper.rows):
        return matches
    # Of such a table, the other rows are for models that the authors trained themselves.
    return [
        [run for run in row_runs if _is_released(run) == row.get("released", False)]
        for row, row_runs in zip(paper.rows, matches)
    ]


def _is_released(run: UserRun) -> bool:
    return run.training is not None and run.training.is_released


def _build_table(paper: PaperTable, matches: Sequence[Sequence[UserRun]]) -> dict[str, Any]:
    rows = []
    for row, runs in zip(paper.rows, matches):
        models: dict[str, list[UserRun]] = {}
        for run in runs:
            models.setdefault(run.model, []).append(run)
        ours = [
            {
                "runs": [_describe_run(run) for run in runs_of_model],
                "values": _select_figures(paper, runs_of_model),
                "differences": list_deviations(runs_of_model),
            }
            for runs_of_model in models.values()
        ]
        if paper.recipe == TRANSLATION:
            _mark_best(list(models.values()), ours)
        spec = row["position_encoding"]
        computed = {  # figures that need no run: thousands of position parameters
            column: count_at_base_size(spec) / 1000
            for column, figure in paper.columns.items()
            if figure[0] == "parameters"
        }
        rows.append(
            {
                "name": row["name"],
                "encoding": spec,
                "paper": row["values"],
                "ours": ours,
                "paper_texts": row.get("texts", {}),
                "computed": computed,
            }
        )
    return {
        "id": paper.id,
        "title": paper.title,
        "columns": list(paper.columns),
        "rows": rows,
        "note": paper.note,
    }


def _select_figures(paper: PaperTable, runs_of_model: Sequence[UserRun]) -> dict[str, float]:
    """Select the figures of a model by column of a table.

    The runs, such as one of GLUE and one of SQuAD, measure different figures. A column ``average``
    is the mean of all others, if the model has them.
    """
    figures = {key: value for run in runs_of_model for key, value in run.figures.items()}
    columns = paper.columns.items()
    selected = {name: figures[key] for name, key in columns if key in figures}
    others = [name for name, key in columns if key[0] != "average"]
    if selected.keys() >= set(others):
        average = statistics.fmean(selected[name] for name in others)
        selected |= {name: average for name, key in columns if key[0] == "average"}
    return selected


def _mark_best(models: Sequence[Sequence[UserRun]], ours: Sequence[dict[str, Any]]) -> None:
    """Mark the best model of each group whose models differ only by seed: the paper reports it.

    Its entry gets ``best_of``, the number of trainings, and ``best_by``, the deciding column.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for runs_of_model, entry in zip(models, ours):
        if (training := find_training(runs_of_model)) is not None:
            shared = {k: v for k, v in training.settings.items() if k not in _DIFFER_BY_SEED}
            # A text, because the values may be lists, which have no hash.
            groups.setdefault(repr(sorted(shared.items(), key=str)), []).append(entry)
    for group in groups.values():
        for column, choose in _BEST_BY.items():
            if len(group) > 1 and all(column in entry["values"] for entry in group):
                best = choose(group, key=lambda entry: entry["values"][column])
                best |= {"best_of": len(group), "best_by": column}
                break


def _belongs_to_row(run: UserRun, paper: PaperTable, row: dict[str, Any]) -> bool:
    """Check whether a run has the recipe, encoding and directions of a row."""
    if run.recipe != row.get("recipe", paper.recipe) or run.encoding is None:
        return False
    if specs.parse(run.encoding) != specs.parse(row["position_encoding"]):
        return False
    if run.directions is None:  # not known
        return "attention_directions" not in row
    ours, papers = (
        format_directions([part.strip() for part in text.split(",")])
        for text in (run.directions, row.get("attention_directions", ""))
    )
    return ours == papers


def _explain_absence(run: UserRun) -> str:
    """Explain why a run belongs to no row: what the tables of its recipe lack."""
    tables = [paper for paper in load_tables().values() if paper.recipe == run.recipe]
    if not tables:
        return f"no table has the recipe {run.recipe}"
    if run.encoding is None:
        return "its positions are not known"
    with_row = [
        paper for paper in tables if any(_belongs_to_row(run, paper, row) for row in paper.rows)
    ]
    names = ", ".join(paper.id for paper in with_row or tables)
    if not with_row:
        return f"{names}: no row has {run.encoding} with its directions"
    figures = ", ".join(map(_format_figure, run.figures)) or "no figures"
    return f"{names}: no column for {figures}"


def _describe_run(run: UserRun) -> dict[str, Any]:
    names = ("name", "kind", "recipe", "encoding", "directions", "notes")
    return {**{name: getattr(run, name) for name in names}, "path": str(run.path)}


def _format_figure(figure: Figure) -> str:
    """Join the words of a figure: its task, metric and split."""
    return " ".join(filter(None, figure))
