"""Opens the data-bin of a GLUE task, which ``fairseq-posenc preprocess glue`` writes."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, MANIFEST
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import TASKS, Task

_ADVICE = "make it with fairseq-posenc preprocess glue"


class GlueDataBin(NamedTuple):
    """The data-bin of one task."""

    path: Path  # absolute
    task: Task
    # split -> counts, such as `examples` and `longest`, the tokens of its longest example
    splits: dict[str, dict[str, int]]
    longest: int  # tokens of the longest example of all splits, with special symbols

    @property
    def dictionary(self) -> Path:
        """Path of fairseq's dictionary."""
        return self.path / "input0" / DICTIONARY

    def check_lengths(self, max_positions: int, model: object) -> None:
        """Refuse examples that are too long for a model, whose name or path is ``model``."""
        if self.longest > max_positions:
            sizes = f"an example of {self.longest} tokens and {model} takes {max_positions}"
            raise UserError(f"{self.path} has {sizes}: make it with --max-tokens {max_positions}")

    def test_ids(self, split: str) -> list[str]:
        """Read the ids that GLUE gave the examples of a test set, in order."""
        return (self.path / f"{split}.ids").read_text(encoding="utf-8").splitlines()


def open_glue_data(path: Path) -> GlueDataBin:
    """Open a data-bin.

    Raises:
        UserError: it is missing, or was made by another program.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise UserError(f"{path} is not a data-bin of a GLUE task: it has no {MANIFEST}; {_ADVICE}")
    try:
        content: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        task = TASKS[content["glue_task"]]
        splits = dict(content["splits"])
        longest = max(counts["longest"] for counts in splits.values())
        return GlueDataBin(path.resolve(), task, splits, longest)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{manifest} describes no GLUE task ({error!r}); {_ADVICE}") from error


def find_training_data(folder: Path, task: Task) -> GlueDataBin:
    """Open the data-bin of a task for training.

    Raises:
        UserError: it is missing, is not a data-bin of GLUE, or has no training or development set.
    """
    path = folder / task.name
    if not path.is_dir():
        how = f"{_ADVICE} --tasks {task.name}"
        raise UserError(f"{path} does not exist: {how}, or leave the task out with --tasks")
    data = open_glue_data(path)
    missing = [split for split in ("train", *task.valid_splits) if split not in data.splits]
    if missing:
        how = f"{_ADVICE} from all files of {task.name}, or leave the task out with --tasks"
        raise UserError(f"{path} has no {' and no '.join(missing)} set: {how}")
    return data
