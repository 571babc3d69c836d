"""Predictions for the test sets, as GLUE's site takes them: a file for each set."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fairseq_posenc.running.steps import write_whole
from fairseq_posenc.tasks.glue.data import DataBin
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, Task


def write_submission(folder: Path, name: str, data: DataBin, split: str, outputs: Tensor) -> None:
    """Write ``NAME.tsv`` with the columns index and prediction.

    Args:
        folder: made if it does not exist.
        name: of the file, without its ending.
        data: of the task.
        split: a test set.
        outputs: of the model, (N, C), in the order of the test set.
    """
    rows = zip(data.test_ids(split), predictions(data.task, outputs))
    text = "".join(f"{index}\t{prediction}\n" for index, prediction in rows)
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{name}.tsv", "index\tprediction\n" + text)


def predictions(task: Task, outputs: Tensor) -> list[str]:
    """Return what is written: the label, or a score between 0 and 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[number] for number in outputs.argmax(-1).tolist()]
