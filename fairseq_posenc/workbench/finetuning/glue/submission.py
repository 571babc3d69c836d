"""Writes predictions for the test sets as GLUE's site accepts them: a file for each set."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fairseq_posenc.files import write_whole
from fairseq_posenc.tasks.glue.data import GlueDataBin
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, SUBMISSION, WNLI, Task


def write_submission(
    folder: Path, name: str, data: GlueDataBin, split: str, outputs: Tensor
) -> None:
    """Write ``NAME.tsv`` with the columns index and prediction.

    Args:
        folder: made if it does not exist.
        name: name of the file without its suffix.
        data: data-bin of the task.
        split: name of the test set.
        outputs: the model's outputs in the order of the test set, ``(examples, classes)``.
    """
    folder.mkdir(exist_ok=True)
    predictions = format_predictions(data.task, outputs)
    write_predictions(folder / f"{name}.tsv", data.test_ids(split), predictions)


def write_predictions(path: Path, ids: Sequence[str], predictions: Sequence[str]) -> None:
    """Write a file of a submission, with the columns index and prediction."""
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in zip(ids, predictions))
    write_whole(path, "index\tprediction\n" + rows)


def complete_submission(folder: Path, data: Path) -> list[str]:
    """Add the file of WNLI, which predicts its majority class; list the files that are missing.

    Args:
        folder: folder of the submission.
        data: folder of the data-bins, with WNLI's file if preprocessing wrote it.

    Returns:
        The names of the missing files.
    """
    wnli = data / f"{WNLI.name}.tsv"
    if wnli.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(wnli, folder / wnli.name)
    return [name for name in SUBMISSION if not (folder / f"{name}.tsv").exists()]


def format_predictions(task: Task, outputs: Tensor) -> list[str]:
    """Format the outputs, (N, C), as labels, or as scores between 0 and 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[number] for number in outputs.argmax(-1).tolist()]
