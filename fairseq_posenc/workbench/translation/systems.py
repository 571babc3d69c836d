"""Parses the systems of ``fairseq-posenc bleu``, and translates a test set with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import Request, checksum, read_result, write_result
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.dictionaries import open_task
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.running.options import parse_named, split_trainings
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation.checkpoint import (
    ParallelDataBin,
    average_checkpoints,
    find_last_checkpoints,
    load_translation,
)
from fairseq_posenc.workbench.translation.translator import Translator


class Search(NamedTuple):
    """Settings of beam search."""

    beam: int  # beam size; 1 is greedy
    length_penalty: float  # below 1 favours short translations, above 1 long ones

    @property
    def name(self) -> str:
        """Name in tables."""
        return "greedy" if self.beam == 1 else f"beam {self.beam}"

    def text_file(self, folder: Path) -> Path:
        """Build the path of its translations in the folder of a training."""
        return folder / f"{self.name.replace(' ', '-')}.txt"


@dataclass(frozen=True)
class Contender:
    """A training of a system."""

    name: str  # name of the system in tables; its trainings differ by seed
    path: str  # as the user gave it
    number: int  # of the system's trainings, from 1
    checkpoints: list[Path]  # one, several of an ensemble, or several to average
    is_average: bool

    @property
    def label(self) -> str:
        """Name of the training in messages."""
        return self.name if self.number == 1 else f"{self.name}, training {self.number}"

    def folder(self, out: Path) -> Path:
        """Build the path of the folder of its translations."""
        return out / self.name / (f"training-{self.number}" if self.number > 1 else "")


def parse_systems(texts: Sequence[str], average: int | None) -> list[Contender]:
    """Parse the systems of a command line, each ``NAME=PATH[,PATH...]`` or a path; list trainings.

    ``average`` is the number of checkpoints of ``--average``, or None.

    Raises:
        UserError: a name is not valid for a folder or occurs twice; one system has more trainings
            than another; a folder without ``average``, or a checkpoint with it.
    """
    named_texts = []
    for text in texts:
        is_path = "=" not in text or Path(text).exists()  # a path may contain "="
        named_texts.append(f"{_derive_name(text)}={text}" if is_path else text)
    form = "NAME=PATH or NAME=PATH,PATH"
    paths = {name: split_trainings(path) for name, path in parse_named(named_texts, form).items()}
    counts = {name: len(names) for name, names in paths.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UserError(f"name the same number of trainings for each system: {listed}")
    return [
        Contender(name, path, number, _find_checkpoints(path, average), average is not None)
        for name, names in paths.items()
        for number, path in enumerate(names, start=1)
    ]


def _derive_name(path: str) -> str:
    """Derive a system's name from its first path: the name of the checkpoint's folder."""
    first = Path(split_paths(split_trainings(path)[0])[0])
    name = first.parent.name if first.suffix == ".pt" else first.name
    return name.replace("=", "-")


def _find_checkpoints(path: str, average: int | None) -> list[Path]:
    is_folder = Path(path).is_dir()
    if is_folder and average:
        return find_last_checkpoints(Path(path), average)
    if is_folder:
        raise UserError(f"{path} is a folder; name a checkpoint in it, or --average N")
    if average:
        raise UserError(f"--average {average}: {path} is not a folder of checkpoints")
    return [Path(name) for name in split_paths(path)]


def open_data_bin(training: Contender, data: Path | None) -> ParallelDataBin:
    """Open all checkpoints of a training, so that mistakes show early, and name their data.

    Raises:
        UserError: a checkpoint or the data are missing or damaged, or do not fit each other.
    """
    opened = [
        open_task(path, load_translation(path, f"{training.label}:"), data)
        for path in training.checkpoints
    ]
    return ParallelDataBin.from_opened(opened[0])


@dataclass(frozen=True)
class SourceText:
    """The sources of a test set, and how to translate them."""

    source: Path
    sentences: list[str]  # content of the file
    searches: Sequence[Search]
    compute: ComputeOptions

    def translate(
        self, training: Contender, data_bin: ParallelDataBin, out: Path
    ) -> dict[Search, list[str]]:
        """Translate with a model by each search, unless a file in ``out`` has the result.

        Raises:
            UserError: a file has translations by other models, of another text or by other options.
        """
        folder = training.folder(out)
        model: Request = {
            "checkpoints": [checksum(path) for path in training.checkpoints],
            "average": training.is_average,
            "pieces": checksum(data_bin.find_pieces(data_bin.source)),
            "source": checksum(self.source),
            "precision": str(self.compute.dtype),
            "version": __version__,
        }
        translations: dict[Search, list[str]] = {}
        translator = None
        for search in self.searches:
            path = search.text_file(folder)
            request = {**model, "search": list(search)}
            figures = read_result(path.with_suffix(".json"), request)
            if figures is None:
                folder.mkdir(parents=True, exist_ok=True)
                translator = translator or self._load(training, data_bin, folder)
                say(f"{training.label}, {search.name}: {len(self.sentences):,} sentences")
                found = translator.translate(self.sentences, search.beam, 1, search.length_penalty)
                lines = [best.text for (best,) in found]
                figures = {"translations": lines}
                write_whole(path, "".join(f"{line}\n" for line in lines))
                write_result(path.with_suffix(".json"), request, figures)
            translations[search] = figures["translations"]
        return translations

    def _load(self, training: Contender, data_bin: ParallelDataBin, folder: Path) -> Translator:
        """Load the models of a training; if it is to be averaged, write their average first."""
        checkpoints = training.checkpoints
        if training.is_average:
            average = folder / f"checkpoint_average_{len(checkpoints)}.pt"
            average_checkpoints(checkpoints, average)
            checkpoints = [average]
        return Translator.load(*checkpoints, data=data_bin.folder, compute=self.compute)
