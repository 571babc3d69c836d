"""All steps of a comparison in order; those that are done are not repeated."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Callable, NamedTuple

from fairseq_posenc.compare import corpus, pieces, training
from fairseq_posenc.compare.contenders import Contender
from fairseq_posenc.compare.documents import python_library
from fairseq_posenc.compare.settings import TRAIN_OPTIONS, Settings
from fairseq_posenc.running import trainings
from fairseq_posenc.running.checkpoints import updates_done
from fairseq_posenc.running.logs import Curve, Entry, read_curve_file
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.progress import bar, say
from fairseq_posenc.running.steps import Facts, Step
from fairseq_posenc.version import __version__


class Outcome(NamedTuple):
    """What came out for one model.

    Attributes:
        contender: the model.
        curve: its learning curve and speed.
        perplexity: on the validation text, by ``fairseq-validate``.
        position_parameters: number of parameters of its position encodings.
        seconds: time of the training.
    """

    contender: Contender
    curve: Curve
    perplexity: float
    position_parameters: int
    seconds: float


class Results(NamedTuple):
    """What came out of a comparison.

    Attributes:
        settings: the user's choices.
        text: figures of the text.
        outcomes: one for each model, in the user's order.
    """

    settings: Settings
    text: Facts
    outcomes: list[Outcome]


def data_folder(settings: Settings) -> Path:
    """Return the folder that ``fairseq-preprocess`` fills."""
    return settings.out / "data" / "binary"


def model_folder(settings: Settings, contender: Contender) -> Path:
    """Return the folder of one model's checkpoints and log."""
    return settings.out / "models" / contender.folder


class Pipeline:
    """The steps of one comparison.

    Args:
        settings: the user's choices.
        lock: open file that the started programs keep open.
    """

    def __init__(self, settings: Settings, lock: int) -> None:
        self._settings = settings
        self._lock = lock
        self._text = settings.out / "text"

    def run(self) -> Results:
        """Do all steps and return the figures.

        Raises:
            UserError: a wrong text, or a command that failed.
        """
        text = self._write_text()
        data = self._data_step()
        data.do(lambda: self._make_data(data.folder))
        steps = [self._training_step(contender, data) for contender in self._settings.contenders]
        outcomes = []
        with bar("all models", sum(map(_updates_left, steps)), " updates") as self._bar:
            for number, (contender, step) in enumerate(zip(self._settings.contenders, steps), 1):
                label = f"[{number}/{len(steps)}] {contender.name}"
                outcomes.append(self._model(contender, step, label))
        return Results(self._settings, text, outcomes)

    def _write_text(self) -> Facts:
        path = self._settings.text
        if path is None:
            text, origin = None, f"the documentation in {python_library()}"
            source = f"{origin}, Python {sys.version}"
        else:
            text, origin = corpus.read_text(path), f"--text {path}"
            source = hashlib.sha256(text.encode("utf-8")).hexdigest()
        rules = [corpus.LEAST_WORDS, corpus.VALIDATION_SHARE, corpus.SPLIT_SEED]
        step = Step(self._text, {"source": source, "rules": rules, "version": __version__})
        facts = step.do(lambda: corpus.write_corpus(text, origin, step.folder))
        say(
            f"text: {facts['words']:,} words in {facts['documents']:,} documents, of which "
            f"{facts['valid_words']:,} words are kept for validation"
        )
        return facts

    def _data_step(self) -> Step:
        texts = [(self._text / f"{part}.txt").read_bytes() for part in ("train", "valid")]
        inputs = {
            "text": [hashlib.sha256(text).hexdigest() for text in texts],
            "vocab_size": self._settings.vocab_size,
            "version": __version__,
        }
        return Step(self._settings.out / "data", inputs)

    def _make_data(self, folder: Path) -> Facts:
        vocab_size = self._settings.vocab_size
        say(f"text: learning {vocab_size:,} sentencepieces, then fairseq-preprocess")
        pieces.train_pieces(self._text / "train.txt", folder / "sentencepiece", vocab_size)
        tokens = {}
        for part in ("train", "valid"):
            text, encoded = self._text / f"{part}.txt", folder / f"{part}.pieces"
            tokens[f"{part}_tokens"] = pieces.encode(folder / "sentencepiece.model", text, encoded)
        command = [
            *("fairseq-preprocess", "--only-source", "--destdir", str(data_folder(self._settings))),
            *("--trainpref", str(folder / "train.pieces")),
            *("--validpref", str(folder / "valid.pieces")),
        ]
        run_logged(command, folder / "preprocess.log", self._lock)
        return tokens

    def _training_step(self, contender: Contender, data: Step) -> Step:
        settings = self._settings
        inputs = {
            "data": data.inputs,
            "options": [*TRAIN_OPTIONS, *contender.options, *settings.train_args],
            "seed": settings.seed,
            "version": __version__,
        }
        return Step(model_folder(settings, contender), inputs, settings.updates)

    def _model(self, contender: Contender, step: Step, label: str) -> Outcome:
        trained = step.do(lambda: self._train(contender, step, label), keep_unfinished=True)
        validated = self._validate(step, label)
        say(f"{label}: done; validation perplexity {validated['perplexity']:,.2f}")
        curve = read_curve_file(step.folder / trainings.LOG)
        return Outcome(contender, curve, **trained, **validated)

    def _train(self, contender: Contender, step: Step, label: str) -> Facts:
        done = updates_done(step.folder)
        if done >= step.goal:  # stopped between the end of the training and its stamp
            return trainings.measure(step.folder)
        where = f"to continue at update {done:,}" if done else f"for {step.goal:,} updates"
        say(f"{label}: starting fairseq-train {where}")
        command = training.train_command(
            data_folder(self._settings), step.folder, contender, self._settings
        )
        return trainings.train(command, step.folder, self._watch(done), self._lock)

    def _watch(self, done: int) -> Callable[[Entry], None]:
        """Return what shows the figures of a training that has made some updates."""
        figures: dict[str, str] = {}

        def watch(entry: Entry) -> None:
            nonlocal done
            figures[entry.kind] = f"{entry.perplexity:,.1f}"
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update(max(0, entry.updates - done))
            done = max(done, entry.updates)

        return watch

    def _validate(self, trained: Step, label: str) -> Facts:
        folder = trained.folder / "validation"
        step = Step(folder, {"model": trained.inputs, "updates": trained.goal})
        data = data_folder(self._settings)

        def work() -> Facts:
            say(f"{label}: starting fairseq-validate")
            command = training.validate_command(data, trained.folder, self._settings)
            return training.validate(command, folder / "validate.log", self._lock)

        return step.do(work)


def _updates_left(step: Step) -> int:
    if step.facts is not None:
        return 0
    return step.goal - (updates_done(step.folder) if step.can_continue else 0)
