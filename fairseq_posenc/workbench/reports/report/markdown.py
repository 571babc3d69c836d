"""The report as text, and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.workbench.reports.report.differences import differences
from fairseq_posenc.workbench.reports.report.records import of_records
from fairseq_posenc.workbench.reports.report.runs import Run
from fairseq_posenc.workbench.reports.report.tables import Row, Table
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes.reported import Figure


def as_text(tables: Sequence[Table], others: Sequence[Run], records: Mapping[Path, Record]) -> str:
    """Return the report in Markdown."""
    letters = sorted({table.paper.id[0] for table in tables})
    papers = " ".join(f"{each}: {_paper(each)}." for each in letters)
    legend = f"Every cell is ours / the paper's; - where there is no figure. {papers}"
    parts = [
        "# Our runs beside the papers'" if tables else "# Results",
        legend if tables else "",
        *(_table(table) for table in tables),
        _others(others),
        *of_records(records),
    ]
    return "\n\n".join(part for part in parts if part)


def as_data(
    tables: Sequence[Table], others: Sequence[Run], records: Mapping[Path, Record]
) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "tables": [
            {
                "id": table.paper.id,
                "title": table.paper.title,
                "columns": list(table.paper.columns),
                "rows": [_row_as_data(table, row) for row in table.rows],
                "note": table.paper.note,
            }
            for table in tables
        ],
        "others": [
            {**_run_as_data(run), "figures": {_name(k): v for k, v in run.figures.items()}}
            for run in others
        ],
        "records": [{"path": str(path), **each._asdict()} for path, each in records.items()],
    }


def _row_as_data(table: Table, row: Row) -> dict[str, Any]:
    ours = [
        {
            "runs": [_run_as_data(run) for run in model],
            "values": table.ours(model),
            "differences": differences(model, model[0].recipe),
        }
        for model in row.models
    ]
    own = {"paper_texts": row.texts, "computed": row.computed}
    known = {"name": row.name, "encoding": row.encoding, "paper": row.paper}
    return {**known, "ours": ours, **own}


def _run_as_data(run: Run) -> dict[str, Any]:
    names = ("name", "kind", "recipe", "encoding", "directions", "notes")
    return {**{name: getattr(run, name) for name in names}, "path": str(run.path)}


def _paper(letter: str) -> str:
    source = recipes.load()["sources"][{"A": "m4m", "B": "decbert", "C": "fr_en"}[letter]]
    if source["arxiv"] is None:
        return f"{source['title']} ({source['year']})"
    return f"{source['authors'].split(',')[0]} et al. ({source['year']}), arXiv:{source['arxiv']}"


def _table(table: Table) -> str:
    texts = list(dict.fromkeys(name for row in table.rows for name in row.texts))
    header = ["", "our run", *table.paper.columns, *(f"{name}, the paper's" for name in texts)]
    rows = []
    for row in table.rows:
        for model in row.models or [[]]:
            ours = {**row.computed, **table.ours(model)}
            cells = [
                f"{_show(ours.get(column), digits)} / {_show(row.paper.get(column), digits)}"
                for column, digits in table.paper.digits.items()
            ]
            words = [row.texts.get(name, "-") for name in texts]
            name = _names(model) or (f"`{row.encoding}`, counted" if row.computed else "-")
            rows.append([row.name, name, *cells, *words])
    lines = markdown.table(header, rows, f"ll{'r' * len(table.paper.columns)}l")
    title = f"## Table {table.paper.id}: {table.paper.title}"
    note = table.paper.note and f"The paper's figures: {table.paper.note}"
    examples = _examples() if table.paper.id == "C" else ""
    parts = (title, lines, note, _differences(table), examples)
    return "\n\n".join(part for part in parts if part)


def _examples() -> str:
    """Return the report's example sentence, and what its models made of it."""
    recipe = recipes.load()["finetuning"]["translation"]["iwslt17"]
    lines = [
        "The report's example; for a model of ours: `fairseq-posenc translate --checkpoint FILE "
        "--example`.",
        "",
        f"- source: {recipe['example']['source']}",
        f"- reference: {recipe['example']['target']}",
    ]
    for name, outputs in recipe["example_outputs"].items():
        lines.append(f"- `{name}`, greedy: {outputs['greedy']}")
        lines += [f"  - beam search, {score:.4f}: {text}" for score, text in outputs["beam"]]
    return "\n".join(lines)


def _names(model: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(f"`{markdown.plain(run.name)}`" for run in model))


def _differences(table: Table) -> str:
    lines = [
        markdown.plain(
            f"- {_names(model)} ({row.name}): {'; '.join(differences(model, model[0].recipe))}"
        )
        for row in table.rows
        for model in row.models
    ]
    return "\n".join(["What differed:", "", *lines]) if lines else ""


def _others(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    lines = [f"- `{run.name}` ({', '.join(_about(run))}): {_figures(run.figures)}" for run in runs]
    title = "## Runs that belong to no row of the tables"
    return "\n".join([title, "", *map(markdown.plain, lines)])


def _about(run: Run) -> list[str]:
    encoding = run.encoding or "positions not known"
    directions = "directions not known" if run.directions is None else run.directions
    return [part for part in (run.kind, run.recipe, encoding, directions, *run.notes) if part]


def _figures(figures: Mapping[Figure, float]) -> str:
    return ", ".join(f"{_name(key)} {value:.2f}" for key, value in figures.items()) or "no figures"


def _name(figure: Figure) -> str:
    return " ".join(part for part in figure if part)


def _show(value: Optional[float], digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
