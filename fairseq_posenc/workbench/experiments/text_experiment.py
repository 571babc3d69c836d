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
from fairseq_posenc.workbench.experiments import corpus
from fairseq_posenc.workbench.experiments.experiment import Experiment, Results
from fairseq_posenc.workbench.experiments.text_settings import TextSettings
from fairseq_posenc.workbench.experiments.trials import Trial
from fairseq_posenc.workbench.experiments.variants import Run
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Outputs, Stage

TextResults = Results[TextSettings]


class TextExperiment(Experiment[TextSettings]):
    """Models that learn one text: each variant with each learning rate and seed."""

    def prepare(self) -> Outputs:
        """Write the text, cut it into sentencepieces and binarize it; return its figures."""
        facts = self._write_text()
        self._data.do(self._make_data)
        return facts

    def trial(self, run: Run) -> Trial:
        """Build a training; where another length is read, measured at that one as well."""
        settings, trial = self.settings, self._build_trial(run, self._data)
        if settings.eval_length in (0, settings.trained):  # a training ends with a validation
            return trial
        folder = settings.folder(run) / f"read-{settings.eval_length}"
        measure = [
            *("fairseq-posenc", "lm-length", "--data", str(settings.data())),
            *("--lengths", str(settings.eval_length)),
            *("--mode", "non-overlapping", "--out", str(folder)),
            f"read={settings.folder(run) / LAST}",
        ]

        def read_perplexity(_: list[str]) -> Outputs:
            """Read the perplexity that was found; infinite without one."""
            record = json.loads((folder / "lm-length.json").read_text(encoding="utf-8"))
            (row,) = record["figures"]["perplexity"]
            return {"perplexity": math.inf if row["perplexity"] is None else row["perplexity"]}

        return trial._replace(measure=measure, parse_figures=read_perplexity)

    @property
    def _text(self) -> Path:
        return self.settings.out / "text"

    def _write_text(self) -> Outputs:
        path = self.settings.text
        if path is None:
            text, origin = None, f"the documentation in {corpus.find_python_library()}"
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

    def _make_data(self) -> Outputs:
        vocab_size, binary = self.settings.vocab_size, self.settings.data()
        folder = self._data.folder
        say(f"text: learning {vocab_size:,} sentencepieces, then fairseq-preprocess")
        binary.mkdir()
        # Beside the dictionary, where every command that reads text with a model looks for it.
        corpus.train_pieces(self._text / "train.txt", binary / "sentencepiece", vocab_size)
        model, tokens = binary / "sentencepiece.model", {}
        for part in ("train", "valid"):
            text, encoded = self._text / f"{part}.txt", folder / f"{part}.pieces"
            tokens[f"{part}_tokens"] = corpus.write_pieces(model, text, encoded)
        command = [
            *("fairseq-preprocess", "--only-source", "--destdir", str(binary)),
            *("--trainpref", str(folder / "train.pieces")),
            *("--validpref", str(folder / "valid.pieces")),
        ]
        run_logged(command, folder / "preprocess.log", self._lock)
        return tokens
