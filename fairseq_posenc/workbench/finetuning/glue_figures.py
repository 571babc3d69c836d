"""Selects the figures that the papers report from the record of ``fairseq-posenc glue``."""

import statistics

from fairseq_posenc.tasks.glue.definitions import name_column
from fairseq_posenc.workbench.results.record import Record

# What a protocol's paper reports of the runs of a task: a column of the record, and its title.
STATISTICS = {"m4m": "best", "decbert": "mean"}
STATISTIC_TITLES = {"m4m": "best run", "decbert": "mean of the seeds"}


def select_figures(record: Record) -> dict[str, float]:
    """Select the figures that the protocol's paper reports, by column, and add their average."""
    statistic = STATISTICS[record.data["protocol"]]
    named = [(*name_column(row["task"], row["metric"]), row) for row in record.rows]
    # Of MNLI only the matched set's accuracy_m is marked; accuracy_mm is the same metric.
    reported = {(row["task"], metric) for _, metric, row in named if row["reported"]}
    figures: dict[str, float] = {}
    for column, metric, row in named:  # such as MNLI-mm and accuracy
        if (row["task"], metric) in reported:
            figures[column] = float(row[statistic])
    if len(figures) > 1:
        figures["average"] = statistics.fmean(figures.values())
    return figures
