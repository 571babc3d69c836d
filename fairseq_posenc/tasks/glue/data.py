"""A task's data-bin, as ``preprocess/glue.py`` writes it: what its manifest says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import TASKS, Task

MANIFEST = "manifest.json"
HOW = "make it with preprocess/glue.py"


class DataBin(NamedTuple):
    """The data of one task.

    Attributes:
        path: its folder, absolute.
        task: which one it is.
        splits: for each split, its counts; ``examples`` and ``longest`` (in tokens, with the
            symbols between the sentences) among them.
    """

    path: Path
    task: Task
    splits: dict[str, dict[str, int]]

    @property
    def dictionary(self) -> Path:
        """The path of fairseq's dictionary."""
        return self.path / "input0" / "dict.txt"

    @property
    def longest(self) -> int:
        """The most tokens of an example."""
        return max(counts["longest"] for counts in self.splits.values())

    def check_lengths(self, max_positions: int, model: Path) -> None:
        """Refuse examples that are too long for a model.

        Args:
            max_positions: the positions of the model.
            model: its checkpoint.

        Raises:
            UserError: says how long one is.
        """
        if self.longest > max_positions:
            raise UserError(
                f"{self.path} has an example of {self.longest} tokens and {model} takes "
                f"{max_positions}: make it with --max-tokens {max_positions}"
            )

    def test_ids(self, split: str) -> list[str]:
        """Return what identifies the examples of a test set for GLUE, in order."""
        return (self.path / f"{split}.ids").read_text(encoding="utf-8").splitlines()


def open_data(path: Path) -> DataBin:
    """Read what a data-bin is.

    Raises:
        UserError: it is not there, or was made by something else.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise UserError(f"{path} is no data-bin of a GLUE task: it has no {MANIFEST}; {HOW}")
    try:
        content: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        task = TASKS[content["glue_task"]]
        splits = {split: content["splits"][split] for split in content["splits"]}
        return DataBin(path.resolve(), task, splits)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{manifest} is not that of a GLUE task ({error!r}); {HOW}") from error


def find_data(folder: Path, task: Task) -> DataBin:
    """Return the data-bin of a task that is to be trained.

    Raises:
        UserError: it is not in the folder, or lacks a set.
    """
    path = folder / task.name
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} is not there: {HOW} --tasks {task.name}, or leave the task out with --tasks"
        )
    data = open_data(path)
    missing = [split for split in ("train", *task.valid_splits) if split not in data.splits]
    if missing:
        raise UserError(
            f"{path} has no {' and no '.join(missing)} set: {HOW} from all files of {task.name}, "
            "or leave the task out with --tasks"
        )
    return data
