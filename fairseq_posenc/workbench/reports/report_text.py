"""Formats the report in Markdown: the papers' tables, runs outside them, and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.reports.deviations import list_deviations
from fairseq_posenc.workbench.reports.own_runs import OwnRun
from fairseq_posenc.workbench.reports.paper_tables import (
    PaperTable,
    explain_absence,
    format_figure,
)
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training import recipes


def format_report(
    tables: Sequence[PaperTable], others: Sequence[OwnRun], records: Mapping[Path, Record]
) -> str:
    """Format the report in Markdown."""
    letters = sorted({table.paper.id[0] for table in tables})
    papers = " ".join(f"{letter}: {_cite_paper(letter)}." for letter in letters)
    legend = f"Cells have our figure / the paper's; - stands for a missing figure. {papers}"
    parts = [
        "# Our runs beside the papers'" if tables else "# Results",
        legend if tables else "",
        *(_format_table(table) for table in tables),
        _format_unmatched_runs(others),
        *_format_records(records),
    ]
    return "\n\n".join(part for part in parts if part)


def _cite_paper(letter: str) -> str:
    source = recipes.load()["sources"][{"A": "m4m", "B": "decbert", "C": "fr_en"}[letter]]
    if source["arxiv"] is None:
        return f"{source['title']} ({source['year']})"
    return f"{source['authors'].split(',')[0]} et al. ({source['year']}), arXiv:{source['arxiv']}"


def _format_table(table: PaperTable) -> str:
    texts = list(dict.fromkeys(name for row in table.rows for name in row.texts))
    header = ["", "our run", *table.paper.columns, *(f"{name}, the paper's" for name in texts)]
    rows = []
    for row in table.rows:
        named = [(_join_names(model), model) for model in row.models or [[]]]
        for best, count, column in row.best:
            named.append((f"best of {count} runs, by {column}: {_join_names(best)}", best))
        for name, model in named:
            ours = {**row.computed, **table.select_figures(model)}
            cells = [
                " / ".join(
                    f"{figures[column]:,.{digits}f}" if figures.get(column) is not None else "-"
                    for figures in (ours, row.paper)
                )
                for column, digits in table.paper.digits.items()
            ]
            words = [row.texts.get(name, "-") for name in texts]
            name = name or (f"`{row.encoding}`, counted" if row.computed else "-")
            rows.append([row.name, name, *cells, *words])
    lines = markdown.table(header, rows, f"ll{'r' * len(table.paper.columns)}l")
    title = f"## Table {table.paper.id}: {table.paper.title}"
    note = table.paper.note and f"The paper's figures: {table.paper.note}"
    examples = _format_examples() if table.paper.id == "C" else ""
    parts = (title, lines, note, _format_differences(table), examples)
    return "\n\n".join(part for part in parts if part)


def _format_examples() -> str:
    """List the report's example sentence and the outputs of its models."""
    recipe = recipes.load()["finetuning"]["translation"]["iwslt17"]
    lines = [
        "The report's example, which `fairseq-posenc translate --checkpoint FILE --example` "
        "translates with your model:",
        "",
        f"- source: {recipe['example']['source']}",
        f"- reference: {recipe['example']['target']}",
    ]
    for name, outputs in recipe["example_outputs"].items():
        lines.append(f"- `{name}`, greedy: {outputs['greedy']}")
        lines += [f"  - beam search, {score:.4f}: {text}" for score, text in outputs["beam"]]
    return "\n".join(lines)


def _join_names(model: Sequence[OwnRun]) -> str:
    return ", ".join(dict.fromkeys(markdown.code(run.name) for run in model))


def _format_differences(table: PaperTable) -> str:
    lines = []
    for row in table.rows:
        for model in row.models:
            differences = markdown.escape("; ".join(list_deviations(model, model[0].recipe)))
            lines.append(f"- {_join_names(model)} ({row.name}): {differences}")
    return "\n".join(["Differences from the paper:", "", *lines]) if lines else ""


def _format_unmatched_runs(runs: Sequence[OwnRun]) -> str:
    lines = ["## Not in the papers' tables", ""]
    for run in runs:
        encoding = run.encoding or "positions not known"
        directions = "directions not known" if run.directions is None else run.directions
        facts = filter(None, (run.kind, run.recipe, encoding, directions, *run.notes))
        figures = [f"{format_figure(key)} {value:.2f}" for key, value in run.figures.items()]
        lines.append(
            f"- {markdown.code(run.name)} ({markdown.escape(', '.join(facts))}): "
            f"{markdown.escape(', '.join(figures) or 'no figures')}. "
            f"Why: {markdown.escape(explain_absence(run))}."
        )
    return "\n".join(lines) if runs else ""


def _format_records(records: Mapping[Path, Record]) -> Iterator[str]:
    """Yield a section for each kind of record."""
    for kind in dict.fromkeys(record.kind for record in records.values()):
        chosen = [pair for pair in records.items() if pair[1].kind == kind]
        numbered = list(enumerate(chosen, start=1))
        yield f"## Results of {markdown.escape(kind)}"
        yield "\n".join(f"{number}. {_describe_record(*pair)}" for number, pair in numbered)
        yield _format_rows([(n, row) for n, (_, record) in numbered for row in record.rows])


def _describe_record(path: Path, record: Record) -> str:
    """Describe a record by its file, command, positions, seed and data."""
    facts = {"positions": record.spec, "seed": record.seed, **record.data}
    facts_text = "; ".join(
        f"{markdown.escape(name)}: {_format_value(value)}"
        for name, value in facts.items()
        if value is not None
    )
    command = f", {markdown.code(record.command)}" if record.command else ""
    place = f"{markdown.code(path.name)} in {markdown.code(path.parent.name)}"
    return f"{place}{command}: {facts_text}"


def _format_rows(rows: list[tuple[int, Mapping[str, Any]]]) -> str:
    """Format the rows of several records, each with the number of its record, as one table."""
    columns = dict.fromkeys(
        name for _, row in rows for name, value in row.items() if value not in (None, "")
    )
    numbers = [all(not isinstance(row.get(name), str) for _, row in rows) for name in columns]
    cells = [[str(n), *(_format_value(row.get(name)) for name in columns)] for n, row in rows]
    return markdown.table(
        ["", *map(markdown.escape, columns)],
        cells,
        "r" + "".join("lr"[is_number] for is_number in numbers),
    )


def _format_value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else markdown.escape(str(value))
