"""Where the results are that a user names: files of records, and folders of trainings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.reports.report.runs import READERS, Run
from fairseq_posenc.workbench.reports.report.training import PRETRAINING, read_folder
from fairseq_posenc.workbench.reports.report.training import read as read_training
from fairseq_posenc.workbench.reports.report.trainings import of_training
from fairseq_posenc.workbench.reports.report.translations import of_bleu
from fairseq_posenc.workbench.results.record import Record, RecordError, read
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.training import recipes

_KEPT = ("stamp.json", "run.json", "result.json")  # by commands, to go on where they were


class Found(NamedTuple):
    """What an argument names.

    Attributes:
        runs: what may belong to a row of the papers, by file and name.
        records: of all jobs, by file.
    """

    runs: dict[tuple[Path, str], Run]
    records: dict[Path, Record]

    def add(self, other: Found) -> None:
        """Take in what another argument names; what is named twice counts once."""
        self.runs.update(other.runs)
        self.records.update(other.records)


def find(argument: str) -> Found:
    """Return the results of an argument, ``PATH`` or ``RECIPE=PATH``.

    Files that are no record, or one of another version, are named on standard error.

    Raises:
        UserError: there is nothing at all, or a checkpoint that cannot be read.
    """
    recipe, equals, rest = argument.partition("=")
    if equals and recipe in recipes.load()["pretraining"]:
        path, given = Path(rest), recipe
    else:
        path, given = Path(argument), None
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    found, passed_over = Found({}, {}), defaultdict(list)
    for each in _places(path):
        try:
            found.add(_read(each, given))
        except RecordError as error:
            passed_over[str(error)].append(each)
    for reason, files in passed_over.items():
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        say(f"passed over: {files[0]}{more}: {reason}")
    if not (found.runs or found.records or passed_over):
        raise UserError(
            f"{path}: holds no results of a fairseq-posenc command, and no checkpoint of a "
            "pre-training or translation model (checkpoint_last.pt)"
        )
    return found


def _places(path: Path) -> Iterator[Path]:
    """Yield what may be a result: files of JSON, and folders with checkpoints."""
    if path.is_file():
        yield path
        return
    for folder in [path, *sorted(each for each in path.rglob("*") if each.is_dir())]:
        yield folder
        yield from (file for file in sorted(folder.glob("*.json")) if file.name not in _KEPT)


def _read(path: Path, recipe: Optional[str]) -> Found:
    if path.is_dir():
        training = read_folder(path)
        ours = training is not None and training.task in (*PRETRAINING, "translation")
        runs = [of_training(path, training, recipe)] if training and ours else []
        return Found(_by_name(runs), {})
    if path.suffix == ".pt":
        return Found(_by_name([of_training(path, read_training(path), recipe)]), {})
    record = read(path)
    try:
        if record.kind == "bleu":
            runs = of_bleu(path, record)
        else:
            runs = [READERS[record.kind](path, record, recipe)] if record.kind in READERS else []
    except (LookupError, TypeError, ValueError) as error:
        raise RecordError(f"not a whole record of {record.kind} ({error!r})") from error
    return Found(_by_name(runs), {path.resolve(): record})


def _by_name(runs: list[Run]) -> dict[tuple[Path, str], Run]:
    return {(run.path.resolve(), run.name): run for run in runs}
