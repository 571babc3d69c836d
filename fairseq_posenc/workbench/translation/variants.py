"""The variants that an evaluation compares: checkpoints, or text files of finished translations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named, split_trainings


class Variant(NamedTuple):
    """One trained model of the comparison, or a file of its translations."""

    name: str  # its name in tables
    # a checkpoint, several joined by `:` (an ensemble), a folder of checkpoints to average, or a
    # text file with one translation per line
    path: str
    training: int = 1  # its number among those of the same name, which differ by seed; from 1

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name if self.training == 1 else f"{self.name}, training {self.training}"

    @property
    def folder(self) -> Path:
        """The folder of its translations, relative to that of the results."""
        more = [f"training-{self.training}"] if self.training > 1 else []
        return Path(self.name, *more)

    @property
    def is_model(self) -> bool:
        """Whether it is a model, not a file of translations."""
        return all(path.endswith(".pt") for path in self.paths) or self.is_folder

    @property
    def is_folder(self) -> bool:
        """Whether its checkpoints are to be averaged."""
        return Path(self.path).is_dir()

    @property
    def paths(self) -> list[str]:
        """The paths joined by ``:``."""
        names: list[str] = split_paths(self.path)
        return names


def parse_variants(texts: Sequence[str], average: int | None) -> list[Variant]:
    """Parse the variants of a command line, each ``NAME=PATH[,PATH...]`` or a path.

    Of each folder ``average`` checkpoints are averaged.

    Raises:
        UserError: a name cannot be a folder's or is given twice; one variant has more trainings
            than another; a folder without ``average``, or a checkpoint with it.
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
    variants = [
        Variant(name, path, number)
        for name, trainings in paths.items()
        for number, path in enumerate(trainings, start=1)
    ]
    for variant in variants:
        if not is_folder_name(variant.name):
            raise UserError(f"{variant.name!r}: the name must be one that a folder can have")
        if variant.is_folder and not average:
            raise UserError(f"{variant.path} is a folder; name a checkpoint in it, or --average N")
        if variant.is_model and not variant.is_folder and average:
            raise UserError(f"--average {average}: {variant.path} is no folder of checkpoints")
    return variants


def _name(path: str) -> str:
    """Derive a name from a path: the folder of a checkpoint, or the name of a text file."""
    name = Path(path).parent.name if path.endswith(".pt") else Path(path).stem
    return name.replace("=", "-")
