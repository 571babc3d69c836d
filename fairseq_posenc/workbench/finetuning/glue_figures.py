"""Selects the figures that the papers report from the record of ``fairseq-posenc glue``."""

import statistics

from fairseq_posenc.tasks.glue.definitions import name_column
from fairseq_posenc.workbench.results.record import Record

# What a paper reports of the runs of a task, by protocol: a statistic, and its description.
STATISTICS = {"m4m": ("best", "best run"), "decbert": ("mean", "mean of the seeds")}


def select_figures(record: Record) -> dict[str, float]:
    """Select what the protocol's paper reports, by its columns, the tasks, and their average."""
    statistic, _ = STATISTICS[record.data["protocol"]]
    # The column, the metric without its split, and the row: MNLI-mm, accuracy, of accuracy_mm.
    columns = [(*name_column(row["task"], row["metric"]), row) for row in record.rows]
    # Of MNLI's rows, only one of the matched set is marked; its metric selects MNLI-mm's too.
    reported = {(row["task"], metric) for _, metric, row in columns if row["reported"]}
    figures = {
        column: float(row[statistic])
        for column, metric, row in columns
        if (row["task"], metric) in reported
    }
    if len(figures) > 1:
        figures["average"] = statistics.fmean(figures.values())
    return figures
