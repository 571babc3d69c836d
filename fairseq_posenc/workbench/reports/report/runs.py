"""Runs and their figures, from files of results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.reports.report.checkpoint import (
    PRETRAINING,
    Training,
    read,
    translation_task,
)
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.training.recipes import Figure

TRANSLATION = "translation/iwslt17"  # the recipe of all translation models
# Figures, the recipe of such a record unless a user names another, and notes.
Evaluation = tuple[dict[Figure, float], Optional[str], list[str]]
_METRICS = {"BLEU-4 on pieces, 0 to 1": "bleu", "BLEU": "sacreBLEU", "chrF2": "chrF2"}


class Run(NamedTuple):
    """Figures of one model."""

    name: str  # what the report calls it
    kind: str  # `pre-training`, `training` (translation), `glue`, `glue-test`, `squad` or `bleu`
    path: Path  # the file or folder that it is from
    recipe: str  # the paper's set-up that it stands for
    encoding: Optional[str]  # its position encodings, None if not known
    directions: Optional[str]  # what its layers see, as in `lr,rl`; None if not known
    figures: dict[Figure, float]  # in percent, or a perplexity
    training: Optional[Training]  # its pre-training, None if its checkpoint is not there any more
    notes: list[str]  # what a reader has to know of the figures
    record: Optional[Record] = None  # what the file holds, None for a training

    @property
    def model(self) -> str:
        """What is the same for two runs of one pre-trained model."""
        if self.training is None:
            return self.name
        path = self.training.path
        return str(path.parent if path.name.startswith("checkpoint") else path)


def read_runs(path: Path, record: Record, recipe: Optional[str]) -> list[Run]:
    """Build the runs of a record, for the user's recipe if any; none of a kind in no table."""
    if record.kind == "bleu":
        rows = record.figures["scores"]  # the report's own test is greedy
        return [_bleu(path, row, record) for row in rows if row["beam"] in (None, 1)]
    if record.kind not in _EVALUATIONS:
        return []
    figures, usual, notes = _EVALUATIONS[record.kind](record)
    training = read_if_there(record.data.get("checkpoint"), path)
    directions, encoding = record.data.get("attention_directions"), record.spec
    if training is not None:
        directions = training.directions if directions is None else directions
        encoding = encoding or training.encoding
        if training.task not in PRETRAINING:  # a fine-tuned model
            training = read_if_there(training.start, path)
    name, recipe = str(record.data.get("name") or path.stem), recipe or usual
    place = name, record.kind, path, recipe or _recipe_of_m4m(training)
    return [Run(*place, encoding, directions, figures, training, notes, record)]


def _glue(record: Record) -> Evaluation:
    mean = record.data["protocol"] == "decbert"
    figures = {
        _figure(row["task"], row["metric"], "dev"): float(row["mean" if mean else "best"])
        for row in record.figures["tasks"]
    }
    runs = Counter(run["task"] for run in record.figures["runs"])
    collapsed = Counter(run["task"] for run in record.figures["runs"] if run["collapsed"])
    notes = [f"{task}: {n} of {runs[task]} runs collapsed" for task, n in collapsed.items()]
    if unfinished := record.data.get("unfinished"):
        notes.append(f"not finished: {unfinished}")
    return figures, "b_small" if mean else None, notes


def _figure(task: str, metric: str, split: str) -> Figure:
    """Build the column's key; MNLI's two development sets are columns of their own."""
    stem, _, part = metric.rpartition("_")
    return (f"{task}-{part}", stem, split) if part in ("m", "mm") else (task, metric, split)


def _glue_test(record: Record) -> Evaluation:
    figures: dict[Figure, float] = {
        (row["task"], metric, "test"): float(value)
        for row in record.rows
        for metric, value in row.items()
        if metric != "task"
    }
    return figures, "b_large", []


def _squad(record: Record) -> Evaluation:
    task, (row,) = f"SQuAD{record.data['squad']}", record.rows
    return {(task, metric, "dev"): float(row[metric]) for metric in ("exact", "f1")}, None, []


_EVALUATIONS = {"glue": _glue, "glue-test": _glue_test, "squad": _squad}


def _bleu(path: Path, row: Row, record: Record) -> Run:
    is_model = row["beam"] is not None and str(row["path"]).endswith(".pt")
    training = read_if_there(row["path"], path) if is_model else None
    task = translation_task(training)
    figures = {(task, metric, "test"): row[name] for name, metric in _METRICS.items()}
    found: dict[Figure, float] = {
        figure: float(value) for figure, value in figures.items() if value is not None
    }
    notes = [f"sacreBLEU {row['BLEU']:.2f}"]
    return Run(
        name=row["system"],
        kind="bleu",
        path=path,
        recipe=TRANSLATION,
        encoding=training.encoding if training else None,
        directions=training.directions if training else None,
        figures=found,
        training=training,
        notes=notes,
        record=record,
    )


def read_if_there(checkpoint: Any, path: Path) -> Optional[Training]:
    """Read a checkpoint, whose path is relative to here or to the file that names it."""
    if checkpoint is None:
        return None
    places = (Path(checkpoint), path.parent / checkpoint)
    found = next((place for place in places if place.is_file()), None)
    return None if found is None else read(found)


def _recipe_of_m4m(training: Optional[Training]) -> str:
    """Choose the nearest set-up of the M4M paper."""
    if training is not None and training.large:
        return "a_large"
    trained_on = training is not None and (training.released or training.start)
    return "a_base" if trained_on else "a_small"
