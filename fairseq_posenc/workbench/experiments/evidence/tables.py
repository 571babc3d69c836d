"""The figures of encodings as tables, made of the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairseq_posenc.workbench.experiments.evidence import measured
from fairseq_posenc.workbench.experiments.evidence.measured import Column
from fairseq_posenc.workbench.results import markdown


def list_columns(family: str) -> list[Column]:
    """Collect the table columns of a family: results of models, then costs and parameters."""
    return [
        *list_result_columns(family, measured.multiples(family)),
        *filter(None, [measured.probe_ranks(family)]),
        *measured.layer_costs(),
        measured.parameter_counts(),
    ]


def list_result_columns(family: str, multiples: Iterable[int]) -> list[Column]:
    """Collect the columns of models' results; ``multiples`` of the length of training."""
    columns = [
        measured.at_trained_length(family),
        *(measured.at_multiple(family, times) for times in multiples if times > 1),
        *measured.on_another_text(family),
        *measured.fine_tuned(family),
        measured.after_switch(family),
    ]
    return [column for column in columns if column and column.figures]


def format_table(family: str, names: Sequence[str]) -> str:
    """Format the columns of a family for some encodings as a Markdown table."""
    return format_columns(list_columns(family), names)


def format_columns(columns: Sequence[Column], names: Iterable[str]) -> str:
    """Format columns as a Markdown table, a row for each encoding."""
    header = ["encoding", *(column.title for column in columns)]
    rows = [
        [f"`{name}`", *(column.show(name) if name in column.figures else "-" for column in columns)]
        for name in names
    ]
    return markdown.table(header, rows)
