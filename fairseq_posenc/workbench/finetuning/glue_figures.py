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
    selected = [row for row in record.rows if row["reported"]]  # of MNLI, only the matched set's
    reported = {row["task"]: name_column(row["task"], row["metric"])[1] for row in selected}
    figures: dict[str, float] = {}
    for row in record.rows:  # with MNLI's accuracy_mm, which is the metric accuracy too
        column, metric = name_column(row["task"], row["metric"])  # such as MNLI-mm and accuracy
        if metric == reported.get(row["task"]):
            figures[column] = float(row[statistic])
    if len(figures) > 1:
        figures["average"] = statistics.fmean(figures.values())
    return figures
