"""Where the runs are that a user names: files of results, and folders of trainings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from fairseq_posenc import recipes
from fairseq_posenc.errors import UserError
from fairseq_posenc.report.runs import READERS, Run
from fairseq_posenc.report.training import PRETRAINING, read, read_folder
from fairseq_posenc.report.trainings import of_training
from fairseq_posenc.report.translations import of_bleu

_HEAD = 4096  # characters of a file in which its kind has to be named


def find(argument: str) -> list[Run]:
    """Return the runs of an argument, ``PATH`` or ``RECIPE=PATH``.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    recipe, equals, rest = argument.partition("=")
    if equals and recipe in recipes.load()["pretraining"]:
        path, given = Path(rest), recipe
    else:
        path, given = Path(argument), None
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    runs = [run for each in _places(path) for run in _read(each, given)]
    if not runs:
        raise UserError(
            f"{path}: holds no results of fairseq-posenc glue, squad or bleu, and no checkpoint of "
            "a pre-training or translation model (checkpoint_last.pt)"
        )
    return runs


def _places(path: Path) -> Iterator[Path]:
    """Yield what may be a run: files of results, and folders with checkpoints."""
    if path.is_file():
        yield path
        return
    folders = [path, *sorted(each for each in path.rglob("*") if each.is_dir())]
    for folder in folders:
        yield folder
        yield from (file for file in sorted(folder.glob("*.json")) if _has_kind(file))


def _has_kind(file: Path) -> bool:
    with open(file, encoding="utf-8", errors="replace") as stream:
        return '"kind"' in stream.read(_HEAD)


def _read(path: Path, recipe: Optional[str]) -> list[Run]:
    if path.is_dir():
        training = read_folder(path)
        ours = training is not None and training.task in (*PRETRAINING, "translation")
        return [of_training(path, training, recipe)] if training and ours else []
    if path.suffix == ".pt":
        return [of_training(path, read(path), recipe)]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = content.get("kind")
        if kind == "bleu":
            return of_bleu(path, content)
        return [READERS[kind](path, content, recipe)] if kind in READERS else []
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a whole file of results ({error!r})") from error
