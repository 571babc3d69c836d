"""All steps of a comparison in order; those that are done are not repeated."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import corpus, pieces
from fairseq_posenc.workbench.experiments.aggregate import Outcome, SeedAggregate, aggregate
from fairseq_posenc.workbench.experiments.documents import python_library
from fairseq_posenc.workbench.experiments.settings import Settings
from fairseq_posenc.workbench.experiments.training import (
    Run,
    all_runs,
    data_folder,
    measure_command,
    model_folder,
    model_options,
    read_folder,
    train_command,
)
from fairseq_posenc.workbench.experiments.trainings import (
    LOG,
    Trial,
    finished,
    perplexity,
    run_trials,
)
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage


class Results(NamedTuple):
    """What came out of a comparison.

    Attributes:
        settings: the user's choices.
        text: figures of the text.
        outcomes: one for each finished training.
        begun: the learning curves of those that are not finished.
    """

    settings: Settings
    text: Outputs
    outcomes: list[Outcome]
    begun: Mapping[Run, Curve] = {}

    @property
    def models(self) -> list[SeedAggregate]:
        """Each model over its seeds, at its best learning rate, in the user's order."""
        return aggregate(self.outcomes)

    @property
    def missing(self) -> list[Run]:
        """The trainings that are not finished."""
        done = {Run(*each[:3]) for each in self.outcomes}
        return [run for run in all_runs(self.settings) if run not in done]


class Pipeline:
    """The steps of one comparison.

    Args:
        settings: the user's choices.
        jobs: trainings at a time.
        lock: open file that the started programs keep open.
    """

    def __init__(self, settings: Settings, jobs: int, lock: int) -> None:
        self._settings = settings
        self._jobs, self._lock = jobs, lock
        self._text = settings.out / "text"

    def run(self, watch: Optional[Callable[[Callable[[], Results]], None]] = None) -> Results:
        """Do all steps and return the figures.

        Args:
            watch: called now and then, several times a second, with a function that reads what
                there is so far.

        Raises:
            UserError: a wrong text, or a command that failed.
        """
        text = self._write_text()
        data = self._data_step()
        data.do(lambda: self._make_data(data.folder))
        runs = all_runs(self._settings)
        trials = [self._trial(run, self._training_step(run, data)) for run in runs]

        def results() -> Results:
            return self._results(text, runs, trials)

        run_trials(trials, self._jobs, self._lock, (lambda: watch(results)) if watch else None)
        return results()

    def _results(self, text: Outputs, runs: Sequence[Run], trials: Sequence[Trial]) -> Results:
        """Read the figures of all trainings that have begun."""
        outcomes, begun = [], {}
        for run, trial in zip(runs, trials):
            figures, log = finished(trial), trial.step.folder / LOG
            if figures is not None:
                outcomes.append(Outcome(*run, curve=read_curve_file(log), **figures))
            elif trial.step.can_continue and log.is_file():
                begun[run] = read_curve_file(log)
        return Results(self._settings, text, outcomes, begun)

    def _write_text(self) -> Outputs:
        path = self._settings.text
        if path is None:
            text, origin = None, f"the documentation in {python_library()}"
            source = f"{origin}, Python {sys.version}"
        else:
            text, origin = corpus.read_text(path), f"--text {path}"
            source = hashlib.sha256(text.encode("utf-8")).hexdigest()
        rules = [corpus.LEAST_WORDS, corpus.VALIDATION_SHARE, corpus.SPLIT_SEED]
        step = Stage(self._text, {"source": source, "rules": rules, "version": __version__})
        facts = step.do(lambda: corpus.write_corpus(text, origin, step.folder))
        say(
            f"text: {facts['words']:,} words in {facts['documents']:,} documents, of which "
            f"{facts['valid_words']:,} words are kept for validation"
        )
        return facts

    def _data_step(self) -> Stage:
        texts = [(self._text / f"{part}.txt").read_bytes() for part in ("train", "valid")]
        inputs = {
            "text": [hashlib.sha256(text).hexdigest() for text in texts],
            "vocab_size": self._settings.vocab_size,
            "version": __version__,
        }
        return Stage(self._settings.out / "data", inputs)

    def _make_data(self, folder: Path) -> Outputs:
        vocab_size, binary = self._settings.vocab_size, data_folder(self._settings)
        say(f"text: learning {vocab_size:,} sentencepieces, then fairseq-preprocess")
        binary.mkdir()
        # Beside the dictionary, where all that reads text with a model looks for what cut it.
        pieces.train_pieces(self._text / "train.txt", binary / "sentencepiece", vocab_size)
        tokens = {}
        for part in ("train", "valid"):
            text, encoded = self._text / f"{part}.txt", folder / f"{part}.pieces"
            tokens[f"{part}_tokens"] = pieces.encode(binary / "sentencepiece.model", text, encoded)
        command = [
            *("fairseq-preprocess", "--only-source", "--destdir", str(binary)),
            *("--trainpref", str(folder / "train.pieces")),
            *("--validpref", str(folder / "valid.pieces")),
        ]
        run_logged(command, folder / "preprocess.log", self._lock)
        return tokens

    def _training_step(self, run: Run, data: Stage) -> Stage:
        inputs = {
            "data": data.inputs,
            "options": model_options(self._settings, run),
            "seed": run.seed,
            "version": __version__,
        }
        return Stage(model_folder(self._settings, run), inputs, self._settings.updates)

    def _trial(self, run: Run, step: Stage) -> Trial:
        train, measure = train_command(self._settings, run), measure_command(self._settings, run)
        figures = read_folder(self._settings, run) / "lm-length.json"

        def at_length(_: list[str]) -> Outputs:
            """Return the perplexity that was found; infinite where it could not be read."""
            (row,) = json.loads(figures.read_text(encoding="utf-8"))["figures"]["perplexity"]
            return {"perplexity": math.inf if row["perplexity"] is None else row["perplexity"]}

        read = perplexity if measure[0] == "fairseq-validate" else at_length
        return Trial(run.label, step, train, measure, read)
