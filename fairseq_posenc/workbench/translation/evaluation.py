"""An evaluation: every variant translates the test set, and all are scored alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.running.executor import Slurm, run_pieces
from fairseq_posenc.workbench.running.files import checksum, write_whole
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named, split_trainings
from fairseq_posenc.workbench.running.stages import Piece, Stage
from fairseq_posenc.workbench.tokens.files import read_lines
from fairseq_posenc.workbench.translation.average import average_checkpoints, last_checkpoints
from fairseq_posenc.workbench.translation.checkpoint import (
    DataBin,
    infer_data_bin,
    load_translation,
    open_data_bin,
)
from fairseq_posenc.workbench.translation.generate import Generation, Options, Search
from fairseq_posenc.workbench.translation.report import Evaluation, VariantScores
from fairseq_posenc.workbench.translation.scores import PieceBleu, Scorer


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
        f"{_derive_name(text)}={text}" if "=" not in text or Path(text).exists() else text
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


def _derive_name(path: str) -> str:
    """Derive a name from a path: the folder of a checkpoint, or the name of a text file."""
    name = Path(path).parent.name if path.endswith(".pt") else Path(path).stem
    return name.replace("=", "-")


class Request(NamedTuple):
    """What the user asked for."""

    variants: list[Variant]  # what is evaluated
    average: Optional[int]  # number of checkpoints to average in each folder, or None
    # folder with the test set; None for the one that each model was trained on
    data: Optional[Path]
    reference: Optional[Path]  # file with the references; None for the one in the data folder
    # file with the sources; None for the one in the data folder, if there is one
    source: Optional[Path]
    searches: list[Search]  # how to search, the one to compare variants by last
    options: Options  # of all translations
    cluster: Optional[Slurm]  # that translates; None for this machine


class _Model(NamedTuple):
    checkpoints: list[Path]
    data: DataBin


class _Texts(NamedTuple):
    path: Path  # of the references
    references: list[str]
    sources: Optional[list[str]]
    data: Optional[DataBin]  # the folder that they belong to

    def check(self, what: str, count: int) -> None:
        """Refuse what has not as many sentences as there are references."""
        expected = len(self.references)
        if count != expected:
            raise UserError(f"{what} has {count} sentences, but {self.path} has {expected}")


def evaluate(request: Request, out: Path) -> Evaluation:
    """Translate what is not translated yet into a folder, and score it.

    Raises:
        UserError: wrong input, found before anything is translated.
        RunError: ``fairseq-generate`` failed.
    """
    models = {
        variant: _find_model(variant, request) for variant in request.variants if variant.is_model
    }
    texts = _read_texts(request, list(models.values()))
    written = _check_all(request, models, texts)
    scorer, piece_bleu = Scorer(texts.references), PieceBleu(texts.data, texts.references)
    generations = {each: _build_generation(each, models[each], request, out) for each in models}
    pieces = [_as_piece(each, request.searches) for each in generations.values()]
    run_pieces(pieces, out, request.cluster)
    rows: list[VariantScores] = []
    compared: dict[str, list[list[str]]] = {}  # all trainings of each variant, by the last search
    for variant in request.variants:
        translations = (
            _write_translations(generations[variant], request.searches)
            if variant in models
            else [(None, variant.path, written[variant])]
        )
        for search, path, lines in translations:
            figures = scorer.scores(lines), piece_bleu.score(lines)
            rows.append(
                VariantScores(variant.name, variant.path, variant.training, search, path, *figures)
            )
        compared.setdefault(variant.name, []).append(lines)
    differences, test_signatures = scorer.differences(compared) if len(compared) > 1 else ({}, {})
    return Evaluation(
        subset=request.options.subset,
        reference=str(texts.path),
        sentences=len(texts.references),
        rows=rows,
        signatures=scorer.signatures(),
        piece_bleu=piece_bleu.note,
        baseline=request.variants[0].name,
        differences=differences,
        test_signatures=test_signatures,
        groups=None if texts.sources is None else scorer.by_length(texts.sources, compared),
    )


def _find_model(variant: Variant, request: Request) -> _Model:
    if variant.is_folder:
        checkpoints = last_checkpoints(Path(variant.path), request.average or 0)
    else:
        checkpoints = [Path(path) for path in variant.paths]
    what = f"{variant.label}:"
    found = [
        open_data_bin(path, load_translation(path, what), request.data) for path in checkpoints
    ]
    return _Model(checkpoints, found[0])


def _read_texts(request: Request, models: list[_Model]) -> _Texts:
    """Read references and sources, by default those in a data folder."""
    reference, source = request.reference, request.source
    data = models[0].data if models else infer_data_bin(request.data) if request.data else None
    if data is not None:
        kept = [data.raw(request.options.subset, name) for name in (data.source, data.target)]
        source = source or (kept[0] if kept[0].exists() else None)
        reference = reference or (kept[1] if kept[1].exists() else None)
    if reference is None:
        where = f"{data.folder} holds none" if data else "without --data there is no default"
        raise UserError(f"name the text to score against with --reference: {where}")
    references = read_lines(reference, "--reference")
    sources = read_lines(source, "--source") if source else None
    texts = _Texts(reference, references, sources, data)
    if texts.sources is not None:
        texts.check(f"--source {source}", len(texts.sources))
    return texts


def _check_all(
    request: Request, models: dict[Variant, _Model], texts: _Texts
) -> dict[Variant, list[str]]:
    """Check that everything is as long as the references; return what is written already."""
    written = {}
    for variant in request.variants:
        if variant in models:
            data = models[variant].data
            texts.check(f"{variant.label}: {data.folder}", data.sentences(request.options.subset))
        else:
            written[variant] = read_lines(Path(variant.path), f"{variant.label}:")
            texts.check(f"{variant.label}: {variant.path}", len(written[variant]))
    return written


def _build_generation(variant: Variant, model: _Model, request: Request, out: Path) -> Generation:
    """Build a model's translations; the average of checkpoints is made here."""
    folder, checkpoints = out / variant.folder, model.checkpoints
    if variant.is_folder:
        checkpoints = [_average(checkpoints, folder / "average")]
    return Generation(variant.label, checkpoints, model.data, request.options, folder)


def _as_piece(generation: Generation, searches: list[Search]) -> Piece:
    """Build the piece of work that a model's translations are, here or on a cluster."""

    def work(lock: int) -> None:
        for search in searches:
            generation.run(search, lock)

    def count_left() -> int:
        return sum(map(generation.count_left, searches))

    return Piece(
        generation.label, generation.folder, work, lambda: not count_left(), progress=count_left
    )


def _write_translations(
    generation: Generation, searches: list[Search]
) -> Iterator[tuple[Optional[Search], str, list[str]]]:
    """Yield, for each search, the file of the translations and its lines."""
    for search in searches:
        lines = generation.read(search)
        path = generation.folder / f"{search.file_name}.txt"
        write_whole(path, "".join(f"{line}\n" for line in lines))
        yield search, str(path), lines


def _average(checkpoints: list[Path], folder: Path) -> Path:
    target = folder / f"checkpoint_average_{len(checkpoints)}.pt"
    step = Stage(folder, {"of": [checksum(path) for path in checkpoints], "version": __version__})

    def work() -> dict[str, str]:
        average_checkpoints(checkpoints, target)
        return {}

    step.do(work)
    return target
