"""Evaluates systems on a test set: translates it with every model, and scores all translations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.dictionaries import infer_languages, open_task
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running.executor import LocalMachine, Slurm, run_jobs
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import RunContext, Step
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named, split_trainings
from fairseq_posenc.workbench.tokens.files import read_lines
from fairseq_posenc.workbench.translation.checkpoint import (
    ParallelDataBin,
    average_checkpoints,
    find_data_bin,
    last_checkpoints,
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

    Args:
        texts: the arguments.
        average: number of checkpoints to average in each folder; None if ``--average`` is missing.

    Raises:
        UserError: a name is not valid for a folder or occurs twice; one system has more trainings
            than another; a folder without ``average``, or a checkpoint with it.
    """
    named_texts = [  # a path may contain "="
        f"{_derive_name(text)}={text}" if "=" not in text or Path(text).exists() else text
        for text in texts
    ]
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
    """Derive a name from a path: that of a checkpoint's folder, or of a text file."""
    name = Path(path).parent.name if path.endswith(".pt") else Path(path).stem
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
    cluster: Optional[Slurm]  # where to translate; None for this machine


class _TrainedModel(NamedTuple):
    """The checkpoints of a training, and the data-bin of the test set."""

    checkpoints: list[Path]
    data: ParallelDataBin


class _Texts(NamedTuple):
    """The references of the test set, and its sources where they are known."""

    path: Path  # file of the references
    references: list[str]
    sources: Optional[list[str]]
    data: Optional[ParallelDataBin]  # data-bin of the test set

    def check_count(self, name: str, count: int) -> None:
        """Check that a text is as long as the references; ``name`` is for the message."""
        expected = len(self.references)
        if count != expected:
            raise UserError(f"{name} has {count} sentences, but {self.path} has {expected}")


def evaluate(request: BleuRequest, out: Path) -> Record:
    """Make the translations that are missing in a folder, score them, and build the record.

    Raises:
        UserError: wrong input; raised before anything is translated.
        RunError: ``fairseq-generate`` failed.
    """
    models = {
        training: _find_model(training, request)
        for training in request.trainings
        if training.is_model
    }
    texts = _read_texts(request, list(models.values()))
    files = _read_translations(request, models, texts)
    scorer = Scorer(texts.references)
    piece_bleu = PieceBleu(texts.data, texts.references)
    generations = {
        training: _prepare_generation(training, model, request, out)
        for training, model in models.items()
    }
    jobs = [generation.build_job(request.searches) for generation in generations.values()]
    run_jobs(jobs, out, request.cluster or LocalMachine())
    rows: list[Row] = []
    compared: dict[str, list[list[str]]] = {}  # all trainings of each system, by the last search
    for training in request.trainings:
        translations: dict[Optional[Search], tuple[str, list[str]]]
        if training in models:
            translations = {s: generations[training].join(s) for s in request.searches}
        else:
            translations = {None: (training.path, files[training])}
        for search, (path, lines) in translations.items():
            row = {
                "system": training.name,
                "path": training.path,
                "training": training.number,
                **(search._asdict() if search else dict.fromkeys(Search._fields)),
                "hypotheses": path,
                **scorer.score(lines),
                PIECE_BLEU: piece_bleu.score(lines),
            }
            rows.append(row)
        compared.setdefault(training.name, []).append(lines)
    differences, test_signatures = scorer.compare(compared) if len(compared) > 1 else ([], {})
    data = {
        "subset": request.options.subset,
        "reference": str(texts.path),
        "sentences": len(texts.references),
        "baseline": request.trainings[0].name,
        **{f"signature of {name}": text for name, text in scorer.signatures().items()},
        **{f"test signature of {name}": text for name, text in test_signatures.items()},
        f"signature of {PIECE_BLEU}": piece_bleu.note,
    }
    tables = {"scores": rows, "means": compute_means(rows), "differences": differences}
    tables["lengths"] = (
        [] if texts.sources is None else scorer.score_by_length(texts.sources, compared)
    )
    return Record("bleu", tables, data, command=own_command())


def _find_model(training: Training, request: BleuRequest) -> _TrainedModel:
    if training.is_folder:
        checkpoints = last_checkpoints(Path(training.path), request.average or 0)
    else:
        checkpoints = [Path(path) for path in training.paths]
    # All are opened, because each is checked before anything is translated.
    opened = [
        open_task(path, load_translation(path, f"{training.label}:"), request.data)
        for path in checkpoints
    ]
    return _TrainedModel(checkpoints, find_data_bin(opened[0]))


def _read_texts(request: BleuRequest, models: list[_TrainedModel]) -> _Texts:
    """Read references and sources, by default those in a data folder."""
    reference, source = request.reference, request.source
    data = models[0].data if models else None
    if data is None and request.data is not None:
        data = ParallelDataBin(request.data, *infer_languages(request.data))
    if data is not None:
        languages = (data.source, data.target)
        raw = [data.folder / f"{request.options.subset}.raw.{name}" for name in languages]
        source = source or (raw[0] if raw[0].exists() else None)
        reference = reference or (raw[1] if raw[1].exists() else None)
    if reference is None:
        reason = f"{data.folder} has none" if data else "without --data there is no default"
        raise UserError(f"name the reference translations with --reference: {reason}")
    references = read_lines(reference, "--reference")
    sources = read_lines(source, "--source") if source else None
    texts = _Texts(reference, references, sources, data)
    if sources is not None:
        texts.check_count(f"--source {source}", len(sources))
    return texts


def _read_translations(
    request: BleuRequest, models: dict[Training, _TrainedModel], texts: _Texts
) -> dict[Training, list[str]]:
    """Read the user's files of translations; check that everything is as long as the references."""
    files = {}
    for training in request.trainings:
        if training in models:
            data = models[training].data
            count = data.count_sentences(request.options.subset)
            texts.check_count(f"{training.label}: {data.folder}", count)
        else:
            files[training] = read_lines(Path(training.path), f"{training.label}:")
            texts.check_count(f"{training.label}: {training.path}", len(files[training]))
    return files


def _prepare_generation(
    training: Training, model: _TrainedModel, request: BleuRequest, out: Path
) -> Generation:
    """Build the generation of a model; if the system is a folder, average its checkpoints first."""
    folder = out / training.folder
    checkpoints = model.checkpoints
    if training.is_folder:
        target = folder / "average" / f"checkpoint_average_{len(checkpoints)}.pt"
        inputs = {"of": [checksum(path) for path in checkpoints], "version": __version__}

        def average(context: RunContext) -> None:
            average_checkpoints(model.checkpoints, target)

        Step(target.parent, inputs, average).do()
        checkpoints = [target]
    return Generation(training.label, checkpoints, model.data, request.options, folder)
