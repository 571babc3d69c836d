"""Formats the report in Markdown: the papers' tables, runs outside them, and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.training import recipes


def format_report(report: Mapping[str, Any]) -> str:
    """Format the values of :func:`~.paper_tables.build_report` in Markdown."""
    tables = report["tables"]
    # The letter of a table's name, as in A2, stands for its paper.
    papers = {table["id"][0]: recipes.load_tables()[table["id"]].source for table in tables}
    legend = ["Cells have our figure / the paper's; - stands for a missing figure."]
    legend += [f"{letter}: {_cite_paper(papers[letter])}." for letter in sorted(papers)]
    parts = [
        "# Our runs beside the papers'" if tables else "# Results",
        " ".join(legend) if tables else "",
        *(_format_table(table) for table in tables),
        _format_unmatched_runs(report["others"]),
        *_format_records(report["records"]),
    ]
    return "\n\n".join(filter(None, parts))


def _cite_paper(name: str) -> str:
    source = recipes.load()["sources"][name]
    if source["arxiv"] is None:
        return f"{source['title']} ({source['year']})"
    return f"{source['authors'].split(',')[0]} et al. ({source['year']}), arXiv:{source['arxiv']}"


def _format_table(table: Mapping[str, Any]) -> str:
    """Format a table: a line for each model of ours, and one for a row of the paper without any."""
    digits = recipes.load_tables()[table["id"]].digits
    text_columns = list(dict.fromkeys(name for row in table["rows"] for name in row["paper_texts"]))
    header = ["", "our run", *table["columns"]]
    header += [f"{name}, the paper's" for name in text_columns]
    rows, differences = [], []
    for row in table["rows"]:
        labelled = [(_join_names(model), model["values"]) for model in row["ours"]]
        if not labelled:
            labelled = [(f"`{row['encoding']}`, counted" if row["computed"] else "-", {})]
        for model in row["ours"]:
            names = _join_names(model)
            if "best_of" in model:  # the paper's figures are those of the best seed
                label = f"best of {model['best_of']} runs, by {model['best_by']}: {names}"
                labelled.append((label, model["values"]))
            text = markdown.escape("; ".join(model["differences"]))
            differences.append(f"- {names} ({row['name']}): {text}")
        texts = [row["paper_texts"].get(name, "-") for name in text_columns]
        for label, values in labelled:
            ours = {**row["computed"], **values}
            cells = [
                f"{markdown.format_number(ours.get(column), decimals)} / "
                f"{markdown.format_number(row['paper'].get(column), decimals)}"
                for column, decimals in digits.items()
            ]
            rows.append([row["name"], label, *cells, *texts])
    parts = (
        f"## Table {table['id']}: {table['title']}",
        markdown.table(header, rows, f"ll{'r' * len(digits)}l"),
        table["note"] and f"The paper's figures: {table['note']}",
        "\n".join(["Differences from the paper:", "", *differences]) if differences else "",
        _format_examples() if table["id"] == "C" else "",
    )
    return "\n\n".join(filter(None, parts))


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


def _join_names(model: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(markdown.code(run["name"]) for run in model["runs"]))


def _format_unmatched_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = ["## Not in the papers' tables", ""]
    for run in runs:
        encoding = run["encoding"] or "positions not known"
        directions = "directions not known" if run["directions"] is None else run["directions"]
        facts = filter(None, (run["kind"], run["recipe"], encoding, directions, *run["notes"]))
        figures = [f"{name} {value:.2f}" for name, value in run["figures"].items()]
        lines.append(
            f"- {markdown.code(run['name'])} ({markdown.escape(', '.join(facts))}): "
            f"{markdown.escape(', '.join(figures) or 'no figures')}. "
            f"Why: {markdown.escape(run['why'])}."
        )
    return "\n".join(lines) if runs else ""


def _format_records(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a section for each kind of record."""
    for kind in dict.fromkeys(record["kind"] for record in records):
        chosen = [record for record in records if record["kind"] == kind]
        yield f"## Results of {markdown.escape(kind)}"
        lines, rows = [], []
        for number, record in enumerate(chosen, start=1):
            lines.append(f"{number}. {_describe_record(record)}")
            main_table = next(iter(record["figures"].values()), ())
            rows += [(str(number), row) for row in main_table]
        yield "\n".join(lines)
        yield _format_rows(rows)


def _describe_record(record: Mapping[str, Any]) -> str:
    """Describe a record by its file, command, positions, seed and data."""
    facts = {"positions": record["spec"], "seed": record["seed"], **record["data"]}
    facts_text = "; ".join(
        f"{markdown.escape(name)}: {_format_value(value)}"
        for name, value in facts.items()
        if value is not None
    )
    command = f", {markdown.code(record['command'])}" if record["command"] else ""
    path = Path(record["path"])
    return f"{markdown.code(path.name)} in {markdown.code(path.parent.name)}{command}: {facts_text}"


def _format_rows(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Format the rows of several records, each with the number of its record, as one table."""
    columns = dict.fromkeys(
        name for _, row in rows for name, value in row.items() if value not in (None, "")
    )
    align = "r"
    for name in columns:
        align += "l" if any(isinstance(row.get(name), str) for _, row in rows) else "r"
    cells = [[number, *(_format_value(row.get(name)) for name in columns)] for number, row in rows]
    return markdown.table(["", *map(markdown.escape, columns)], cells, align)


def _format_value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else markdown.escape(str(value))
