"""What is evaluated: models by their checkpoints, or translations that are written already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named, split_trainings


class Variant(NamedTuple):
    """A model of the comparison, in one of its trainings."""

    name: str  # what tables call it
    # what the user named: a checkpoint, several joined by `:` (an ensemble), a folder of
    # checkpoints to average, or a text file with a translation a line
    path: str
    training: int = 1  # its number among those of the same name, which differ by seed; from 1

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name if self.training == 1 else f"{self.name}, training {self.training}"

    @property
    def folder(self) -> Path:
        """Where its translations are kept, in the folder of the results."""
        more = [f"training-{self.training}"] if self.training > 1 else []
        return Path(self.name, *more)

    @property
    def is_model(self) -> bool:
        """Whether it still has to translate."""
        return all(path.endswith(".pt") for path in self.paths) or self.is_folder

    @property
    def is_folder(self) -> bool:
        """Whether its checkpoints are to be averaged."""
        return Path(self.path).is_dir()

    @property
    def paths(self) -> list[str]:
        """The files that it is made of."""
        names: list[str] = split_paths(self.path)
        return names


def parse_variants(texts: Sequence[str], average: int | None) -> list[Variant]:
    """Return the systems of the command line, each ``NAME=PATH[,PATH...]`` or a path.

    Of each folder ``average`` checkpoints are averaged.

    Raises:
        UserError: a name that cannot be a folder's, or two alike; one with more trainings than
            another; a folder without ``average``, or a checkpoint with it.
    """
    given = [  # a path may hold the sign itself
        f"{_name(text)}={text}" if "=" not in text or Path(text).exists() else text
        for text in texts
    ]
    paths = {
        name: split_trainings(path)
        for name, path in parse_named(given, "NAME=PATH or NAME=PATH,PATH", "systems").items()
    }
    counts = {name: len(trainings) for name, trainings in paths.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UserError(f"name as many trainings of each system: {listed}")
    systems = [
        Variant(name, path, number)
        for name, trainings in paths.items()
        for number, path in enumerate(trainings, start=1)
    ]
    for system in systems:
        if not is_folder_name(system.name):
            raise UserError(f"{system.name!r}: the name must be one that a folder can have")
        if system.is_folder and not average:
            raise UserError(f"{system.path} is a folder; name a checkpoint in it, or --average N")
        if system.is_model and not system.is_folder and average:
            raise UserError(f"--average {average}: {system.path} is no folder of checkpoints")
    return systems


def _name(path: str) -> str:
    """Return a name from a path: the folder of a checkpoint, or the name of a text file."""
    name = Path(path).parent.name if path.endswith(".pt") else Path(path).stem
    return name.replace("=", "-")
