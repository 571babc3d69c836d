"""Language models that learn a text: the experiment behind compare and choose."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from functools import cached_property
from pathlib import Path

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import corpus, pieces
from fairseq_posenc.workbench.experiments.experiment import Experiment
from fairseq_posenc.workbench.experiments.results import Results
from fairseq_posenc.workbench.experiments.settings import Run
from fairseq_posenc.workbench.experiments.text_settings import TextSettings
from fairseq_posenc.workbench.experiments.trainings import Trial
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

TextResults = Results[TextSettings]


class TextExperiment(Experiment[TextSettings]):
    """Models that learn one text: each variant with each learning rate and seed."""

    def prepare(self) -> Outputs:
        """Write the text, cut it into sentencepieces and binarize it; return its figures."""
        facts = self._write_text()
        self._data.do(lambda: self._make_data(self._data))
        return facts

    def trial(self, run: Run) -> Trial:
        """Build a training; where another length is read, measured at that one as well."""
        trial = self._build_trial(run, self._data)
        measure = measure_command(self.settings, run)
        if not measure:
            return trial
        figures = _read_folder(self.settings, run) / "lm-length.json"

        def at_length(_: list[str]) -> Outputs:
            """Read the perplexity that was found; infinite where there is none."""
            (row,) = json.loads(figures.read_text(encoding="utf-8"))["figures"]["perplexity"]
            return {"perplexity": math.inf if row["perplexity"] is None else row["perplexity"]}

        return trial._replace(measure=measure, read=at_length)

    @property
    def _text(self) -> Path:
        return self.settings.out / "text"

    def _write_text(self) -> Outputs:
        path = self.settings.text
        if path is None:
            text, origin = None, f"the documentation in {corpus.python_library()}"
            source = f"{origin}, Python {sys.version}"
        else:
            text, origin = corpus.read_text(path), f"--text {path}"
            source = hashlib.sha256(text.encode("utf-8")).hexdigest()
        rules = [corpus.LEAST_WORDS, corpus.VALIDATION_SHARE, corpus.SPLIT_SEED]
        stage = Stage(self._text, {"source": source, "rules": rules, "version": __version__})
        facts = stage.do(lambda: corpus.write_corpus(text, origin, stage.folder))
        say(
            f"text: {facts['words']:,} words in {facts['documents']:,} documents, of which "
            f"{facts['valid_words']:,} words are kept for validation"
        )
        return facts

    @cached_property
    def _data(self) -> Stage:
        texts = [(self._text / f"{part}.txt").read_bytes() for part in ("train", "valid")]
        inputs = {
            "text": [hashlib.sha256(text).hexdigest() for text in texts],
            "vocab_size": self.settings.vocab_size,
            "version": __version__,
        }
        return Stage(self.settings.out / "data", inputs)

    def _make_data(self, data: Stage) -> Outputs:
        vocab_size, binary, folder = self.settings.vocab_size, self.settings.data(), data.folder
        say(f"text: learning {vocab_size:,} sentencepieces, then fairseq-preprocess")
        binary.mkdir()
        # Beside the dictionary, where every command that reads text with a model looks for it.
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


def measure_command(settings: TextSettings, run: Run) -> list[str]:
    """Build the command that measures a model at another length than that of training.

    At its own it needs none: a training ends with a validation.
    """
    model = settings.folder(run)
    if settings.eval_length in (0, settings.trained):
        return []
    return [
        *("fairseq-posenc", "lm-length", "--data", str(settings.data())),
        *("--lengths", str(settings.eval_length)),
        *("--mode", "non-overlapping", "--out", str(_read_folder(settings, run))),
        f"read={model / LAST}",
    ]


def _read_folder(settings: TextSettings, run: Run) -> Path:
    return settings.folder(run) / f"read-{settings.eval_length}"
