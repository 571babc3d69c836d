"""Evaluates systems on a test set: translates it with every model, and scores all translations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum, is_made, whole_folder
from fairseq_posenc.tokens.files import read_lines
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.dictionaries import infer_languages, open_task
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named, split_trainings
from fairseq_posenc.workbench.translation.checkpoint import (
    ParallelDataBin,
    average_checkpoints,
    find_last_checkpoints,
    load_translation,
)
from fairseq_posenc.workbench.translation.generate import Generation, GenerationOptions, Search
from fairseq_posenc.workbench.translation.report import compute_means
from fairseq_posenc.workbench.translation.scores import PIECE_BLEU, PieceBleu, Scorer


class Training(NamedTuple):
    """A training of a system: its checkpoints, or a file with its translations."""

    name: str  # name of the system in tables; its trainings differ by seed
    # a checkpoint, several joined by `:` (an ensemble), a folder of checkpoints to average, or a
    # text file with one translation per line
    path: str
    number: int = 1  # of the system's trainings

    @property
    def label(self) -> str:
        """Name of the training in messages."""
        return self.name if self.number == 1 else f"{self.name}, training {self.number}"

    @property
    def folder(self) -> Path:
        """Folder of its translations, relative to that of the results."""
        parts = [f"training-{self.number}"] if self.number > 1 else []
        return Path(self.name, *parts)

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
        """The paths that ``path`` joins by ``:``."""
        names: list[str] = split_paths(self.path)
        return names


def parse_systems(texts: Sequence[str], average: int | None) -> list[Training]:
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
    paths = {
        name: split_trainings(path)
        for name, path in parse_named(named_texts, form, "systems").items()
    }
    counts = {name: len(names) for name, names in paths.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UserError(f"name the same number of trainings for each system: {listed}")
    trainings = [
        Training(name, path, number)
        for name, names in paths.items()
        for number, path in enumerate(names, start=1)
    ]
    for training in trainings:
        if not is_folder_name(training.name):
            raise UserError(f"{training.name!r}: the name must be a valid folder name")
        if training.is_folder and not average:
            raise UserError(f"{training.path} is a folder; name a checkpoint in it, or --average N")
        if training.is_model and not training.is_folder and average:
            raise UserError(f"--average {average}: {training.path} is not a folder of checkpoints")
    return trainings


def _derive_name(path: str) -> str:
    """Derive a name from the first path: that of a checkpoint's folder, or of a text file."""
    first = Path(split_paths(split_trainings(path)[0])[0])
    name = first.parent.name if first.suffix == ".pt" else first.stem
    return name.replace("=", "-")


class BleuRequest(NamedTuple):
    """The user's choices for an evaluation."""

    trainings: list[Training]  # of all systems, the baseline's first
    average: Optional[int]  # number of checkpoints to average in each folder; None without
    data: Optional[Path]  # folder with the test set; None for the data of each model's training
    reference: Optional[Path]  # file with the references; None for the one in the data folder
    source: Optional[Path]  # file with the sources; None for the one in the data folder, if any
    searches: list[Search]  # settings of beam search; systems are compared by the last
    options: GenerationOptions


class _TrainedModel(NamedTuple):
    """The checkpoints of a training, and the data-bin of the test set."""

    checkpoints: list[Path]
    data: ParallelDataBin


class _TestSet(NamedTuple):
    """The references of the test set, and its sources where they are known."""

    reference_path: Path
    references: list[str]
    sources: Optional[list[str]]
    data_bin: Optional[ParallelDataBin]

    def check_count(self, name: str, count: int) -> None:
        """Check that a text is as long as the references; messages begin with its ``name``."""
        expected = len(self.references)
        if count != expected:
            raise UserError(
                f"{name} has {count} sentences, but {self.reference_path} has {expected}"
            )


class _Translations(NamedTuple):
    """The translations of the test set by a training and a search, or from a user's file."""

    training: Training
    search: Optional[Search]  # None for a file
    path: str
    lines: list[str]

    def describe(self) -> Row:
        """Describe them in a row of the record."""
        no_search = dict.fromkeys(Search._fields)
        return {
            "system": self.training.name,
            "path": self.training.path,
            "training": self.training.number,
            **(self.search._asdict() if self.search else no_search),
            "hypotheses": self.path,
        }


def evaluate(request: BleuRequest, out: Path, lock: int) -> Record:
    """Make the translations that are missing in a folder, score them, and build the record.

    ``lock`` is the open lock of the folder, which the programs inherit.

    Raises:
        UserError: wrong input; raised before anything is translated.
        RunError: ``fairseq-generate`` failed.
    """
    models = {
        training: _find_model(training, request)
        for training in request.trainings
        if training.is_model
    }
    test_set = _read_test_set(request, list(models.values()))
    files = _read_translations(request, models, test_set)
    translations = _translate(request, models, files, out, lock)
    scorer = Scorer(test_set.references)
    piece_bleu = PieceBleu(test_set.data_bin, test_set.references)
    rows: list[Row] = [
        {**texts.describe(), **scorer.score(texts.lines), PIECE_BLEU: piece_bleu.score(texts.lines)}
        for texts in translations
    ]
    # system -> the translations of each of its trainings, by the last search
    compared: dict[str, list[list[str]]] = {}
    for texts in translations:
        if texts.search in (None, request.searches[-1]):
            compared.setdefault(texts.training.name, []).append(texts.lines)
    differences, test_signatures = scorer.compare(compared) if len(compared) > 1 else ([], {})
    facts = {
        "subset": request.options.split,
        "reference": str(test_set.reference_path),
        "sentences": len(test_set.references),
        "baseline": request.trainings[0].name,
        **{f"signature of {name}": text for name, text in scorer.signatures().items()},
        **{f"test signature of {name}": text for name, text in test_signatures.items()},
        f"signature of {PIECE_BLEU}": piece_bleu.note,
    }
    lengths: list[Row] = []
    if test_set.sources is not None:
        lengths = scorer.score_by_length(test_set.sources, compared)
    means = compute_means(rows)
    tables = {"scores": rows, "means": means, "differences": differences, "lengths": lengths}
    return Record("bleu", tables, facts, command=own_command())


def _translate(
    request: BleuRequest,
    models: dict[Training, _TrainedModel],
    files: dict[Training, list[str]],
    out: Path,
    lock: int,
) -> list[_Translations]:
    """Make the translations that are missing; list all of them, and those of files."""
    generations = {
        training: _prepare_generation(training, model, request, out)
        for training, model in models.items()
    }
    for generation in generations.values():
        for search in request.searches:
            generation.translate(search, lock)
    translations = []
    for training in request.trainings:
        if training in files:
            lines = files[training]
            translations.append(_Translations(training, None, training.path, lines))
        else:
            join = generations[training].join
            translations += [
                _Translations(training, search, *join(search)) for search in request.searches
            ]
    return translations


def _find_model(training: Training, request: BleuRequest) -> _TrainedModel:
    if training.is_folder:
        assert request.average is not None  # `parse_systems` refuses a folder without it
        checkpoints = find_last_checkpoints(Path(training.path), request.average)
    else:
        checkpoints = [Path(path) for path in training.paths]
    # All are opened, so that mistakes are reported before anything is translated.
    opened = [
        open_task(path, load_translation(path, f"{training.label}:"), request.data)
        for path in checkpoints
    ]
    return _TrainedModel(checkpoints, ParallelDataBin.from_opened(opened[0]))


def _read_test_set(request: BleuRequest, models: list[_TrainedModel]) -> _TestSet:
    """Read references and sources, by default those in a data folder."""
    reference = request.reference
    source = request.source
    data_bin = models[0].data if models else None
    if data_bin is None and request.data is not None:
        data_bin = ParallelDataBin(request.data, *infer_languages(request.data))
    if data_bin is not None:
        prefix = f"{request.options.split}.raw"
        raw_source = data_bin.folder / f"{prefix}.{data_bin.source}"
        raw_target = data_bin.folder / f"{prefix}.{data_bin.target}"
        if source is None and raw_source.exists():
            source = raw_source
        if reference is None and raw_target.exists():
            reference = raw_target
    if reference is None:
        reason = f"{data_bin.folder} has none" if data_bin else "without --data there is no default"
        raise UserError(f"name the reference translations with --reference: {reason}")
    references = read_lines(reference, "--reference")
    sources = read_lines(source, "--source") if source else None
    test_set = _TestSet(reference, references, sources, data_bin)
    if sources is not None:
        test_set.check_count(f"--source {source}", len(sources))
    return test_set


def _read_translations(
    request: BleuRequest, models: dict[Training, _TrainedModel], test_set: _TestSet
) -> dict[Training, list[str]]:
    """Read the user's files of translations; check that everything is as long as the references."""
    files = {}
    for training in request.trainings:
        if training in models:
            data = models[training].data
            count = data.count_sentences(request.options.split)
            test_set.check_count(f"{training.label}: {data.folder}", count)
        else:
            files[training] = read_lines(Path(training.path), f"{training.label}:")
            test_set.check_count(f"{training.label}: {training.path}", len(files[training]))
    return files


def _prepare_generation(
    training: Training, model: _TrainedModel, request: BleuRequest, out: Path
) -> Generation:
    """Build the generation of a model; if the training is a folder, average its checkpoints."""
    folder = out / training.folder
    checkpoints = model.checkpoints
    if training.is_folder:
        average = folder / "average"
        name = f"checkpoint_average_{len(checkpoints)}.pt"
        inputs = {"of": [checksum(path) for path in checkpoints], "version": __version__}
        if not is_made(average, inputs):
            folder.mkdir(parents=True, exist_ok=True)
            with whole_folder(average, inputs) as partial:
                average_checkpoints(checkpoints, partial / name)
        checkpoints = [average / name]
    return Generation(training.label, checkpoints, model.data, request.options, folder)
