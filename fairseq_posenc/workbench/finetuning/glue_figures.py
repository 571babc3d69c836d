"""Selects the figures that the papers report from the record of ``fairseq-posenc glue``."""

import statistics

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import name_column
from fairseq_posenc.workbench.results.record import Record, get_field

# What a protocol's paper reports of the runs of a task: a column of the record, and its title.
STATISTICS = {"m4m": "best", "decbert": "mean"}
STATISTIC_TITLES = {"m4m": "best run", "decbert": "mean of the seeds"}


def select_figures(record: Record) -> dict[str, float]:
    """Select the figures that the protocol's paper reports, by column, and add their average.

    Raises:
        UserError: a field of the record is missing or wrong.
    """
    if (protocol := get_field(record.data, "protocol", str)) not in STATISTICS:
        raise UserError("protocol is missing or wrong")
    rows = get_field(record.figures, "tasks", list)
    tasks, metrics = ([get_field(row, x, str) for row in rows] for x in ("task", "metric"))
    named = [(*name_column(x, y), row) for x, y, row in zip(tasks, metrics, rows)]
    # Of MNLI only the matched set's accuracy_m is marked; accuracy_mm is the same metric.
    reported = {(row["task"], metric) for _, metric, row in named if row.get("reported")}
    figures: dict[str, float] = {}
    for column, metric, row in named:  # such as MNLI-mm and accuracy
        if (row["task"], metric) in reported:
            figures[column] = float(get_field(row, STATISTICS[protocol], int | float))
    if len(figures) > 1:
        figures["average"] = statistics.fmean(figures.values())
    return figures
