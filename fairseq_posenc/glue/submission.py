"""Predictions for the test sets, as GLUE's site takes them: a file for each set."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fairseq_posenc.running.files import write_whole
from fairseq_posenc.tasks.glue.data import DataBin
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, SUBMISSION, WNLI, Task


def write_submission(folder: Path, name: str, data: DataBin, split: str, outputs: Tensor) -> None:
    """Write ``NAME.tsv`` with the columns index and prediction.

    Args:
        folder: made if it does not exist.
        name: of the file, without its ending.
        data: of the task.
        split: a test set.
        outputs: of the model, (N, C), in the order of the test set.
    """
    folder.mkdir(exist_ok=True)
    found = predictions(data.task, outputs)
    write_predictions(folder / f"{name}.tsv", data.test_ids(split), found)


def write_predictions(path: Path, ids: Sequence[str], predictions: Sequence[str]) -> None:
    """Write one file of a submission: the columns index and prediction."""
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in zip(ids, predictions))
    write_whole(path, "index\tprediction\n" + rows)


def complete(folder: Path, data: Path) -> list[str]:
    """Add what is handed in without a model, and return what GLUE's site wants beside all that.

    Args:
        folder: of the submission.
        data: that ``preprocess/glue.py`` made, with a file for WNLI if its text was there.

    Returns:
        The names of the missing files.
    """
    made = data / f"{WNLI.name}.tsv"
    if made.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(made, folder / made.name)
    return [name for name in SUBMISSION if not (folder / f"{name}.tsv").exists()]


def predictions(task: Task, outputs: Tensor) -> list[str]:
    """Return what is written: the label, or a score between 0 and 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[number] for number in outputs.argmax(-1).tolist()]
