"""The models of an evaluation by ``fairseq-posenc bleu``, as runs."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.workbench.reports.report.runs import Run, read_if_there
from fairseq_posenc.workbench.reports.report.trainings import TRANSLATION, translation_task
from fairseq_posenc.workbench.results.record import Record, Row


def of_bleu(path: Path, record: Record) -> list[Run]:
    """Return a run for each system, with the scores of greedy search.

    Args:
        path: of the file of figures.
        record: of that file.
    """
    return [
        _run(path, row, record)
        for row in record.figures["scores"]
        if row["beam"] in (None, 1)  # the report's own test is greedy
    ]


def _run(path: Path, row: Row, record: Record) -> Run:
    is_model = row["beam"] is not None and str(row["path"]).endswith(".pt")
    training = read_if_there(row["path"], path) if is_model else None
    task = translation_task(training)
    figures = {(task, metric, "test"): row[name] for name, metric in _METRICS.items()}
    return Run(
        row["system"],
        "bleu",
        path,
        TRANSLATION,
        None if training is None else training.encoding,
        None if training is None else training.directions,
        {figure: float(value) for figure, value in figures.items() if value is not None},
        training,
        [f"sacreBLEU {row['BLEU']:.2f}"],
        record,
    )


_METRICS = {"BLEU-4 on pieces, 0 to 1": "bleu", "BLEU": "sacreBLEU", "chrF2": "chrF2"}
