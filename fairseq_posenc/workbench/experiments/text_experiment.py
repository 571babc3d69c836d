"""Experiments on language models that learn a text, for the commands ``compare`` and ``choose``.

The folder ``--out`` gets ``text`` (a training and a validation text), ``data`` (both as pieces and
as a data-bin) and ``models`` (a folder for each run).
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Optional

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import corpus
from fairseq_posenc.workbench.experiments.experiment import RESERVED, Experiment, Results
from fairseq_posenc.workbench.experiments.trainings import Evaluation
from fairseq_posenc.workbench.experiments.variants import CAUSAL, MASKED, Run
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import Job, Outputs, RunContext, Step
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say

# The models are small enough for two cores to train one in minutes, and large enough to learn more
# than a bag of words. Dropout would only slow down trainings of few epochs. The schedule does not
# depend on the number of updates, so a longer training continues a shorter one. By default, fairseq
# drops sentences to make the last batch a multiple of 8, also in validation.
_OPTIONS = """
--task {task} --criterion {criterion} --sample-break-mode none --tokens-per-sample 64
--max-tokens 3072 --required-batch-size-multiple 1 --arch {arch}
--{stack}-layers 2 --{stack}-embed-dim 128 --{stack}-ffn-embed-dim 512 --{stack}-attention-heads 4
--dropout 0 --attention-dropout 0 --optimizer adam --adam-betas '(0.9, 0.98)'
--lr-scheduler inverse_sqrt --warmup-updates 200
"""
TASKS = {MASKED: "masked_lm", CAUSAL: "language_modeling"}
STACKS = {MASKED: "encoder", CAUSAL: "decoder"}  # begin options such as --encoder-layers
LEARNING_RATE = "0.003"
_MIN_VOCAB_SIZE = 16
_MODELS = {
    MASKED: {"criterion": "masked_lm", "arch": "roberta_none_tiny"},
    CAUSAL: {"criterion": "cross_entropy", "arch": "transformer_lm_none_tiny"},
}
TRAIN_OPTIONS = {
    family: shlex.split(_OPTIONS.format(task=TASKS[family], stack=STACKS[family], **model))
    for family, model in _MODELS.items()
}


@dataclass(frozen=True, kw_only=True)
class TextExperiment(Experiment):
    """Language models that learn a text: every variant with every learning rate and seed."""

    condition_name: ClassVar[str] = "learning rate"
    reserved: ClassVar[Mapping[str, str]] = {**RESERVED, "--lr": "use --lrs"}
    family: str = MASKED
    text: Optional[Path] = None  # the user's text file; None for Python's documentation
    eval_length: int = 0  # length of inputs in evaluation, in tokens; 0 for that in training
    # learning rates as the user wrote them; models are compared at their best one
    lrs: tuple[str, ...] = (LEARNING_RATE,)
    vocab_size: int  # number of sentencepieces

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < _MIN_VOCAB_SIZE:
            raise UserError(f"--vocab-size {self.vocab_size}: must be at least {_MIN_VOCAB_SIZE}")
        for lr in self.lrs:
            if not _is_rate(lr):
                raise UserError(f"--lrs {','.join(self.lrs)}: write numbers, as in 0.001,0.003")
        for variant in self.variants:
            parse(variant.position_encoding).check_length(self.size("layers"))

    @property
    def runs(self) -> list[Run]:
        """The trainings: every model with every learning rate and seed."""
        pairs = [(variant, lr) for variant in self.variants for lr in self.lrs]
        return [Run(variant, seed, lr) for seed in self.seeds for variant, lr in pairs]

    def folder(self, run: Run) -> Path:
        """Return the folder of a run's checkpoints and log."""
        return self.out / "models" / name_folder(run)

    def data_folder(self, run: Run) -> Path:
        """Return the data-bin, the same for all runs."""
        return self.out / "data" / "binary"

    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns."""
        defaults = (*TRAIN_OPTIONS[self.family], *run.variant.options)
        return [*defaults, *self.train_args, "--lr", run.condition]

    def count(self, option: str) -> int:
        """Look up the value of an option of ``fairseq-train``, a whole number.

        Raises:
            UserError: the user gave another value, or none.
        """
        value = option_value(self.family, self.train_args, option)
        if not value.isdecimal():
            raise UserError(f"-- {option} {value}: must be a whole number")
        return int(value)

    def size(self, name: str) -> int:
        """Look up a size of the stack, such as ``embed-dim``."""
        return self.count(f"--{STACKS[self.family]}-{name}")

    @property
    def trained(self) -> int:
        """Length of inputs in training, in tokens."""
        return self.count("--tokens-per-sample")

    @property
    def read_length(self) -> int:
        """Length of inputs in evaluation, in tokens."""
        return self.eval_length or self.trained

    def prepare(self, context: RunContext) -> Outputs:
        """Write the text, split it into sentencepieces and binarize it; return its figures."""
        facts = self._write_text()
        self._data_step.do(context)
        pieces = [self._data_step.folder / f"{part}.pieces" for part in ("train", "valid")]
        return {**facts, "unigram_perplexity": corpus.unigram_perplexity(*pieces)}

    def job(self, run: Run) -> Job:
        """Build the job of a training, with an evaluation if it is at another length."""
        if self.read_length == self.trained:  # the last validation has this length
            return self._build_job(run, self._data_step.inputs)
        folder = self.folder(run) / f"read-{self.read_length}"
        command = ["fairseq-posenc", "lm-length", "--data", str(self.data_folder(run))]
        command += f"--lengths {self.read_length} --mode non-overlapping".split()
        command += ["--out", str(folder), f"read={self.folder(run) / LAST}"]

        def read_perplexity(_: list[str]) -> Outputs:
            """Read it from the command's record; infinite if the model cannot read this length."""
            record = json.loads((folder / "lm-length.json").read_text(encoding="utf-8"))
            (row,) = record["figures"]["perplexity"]
            return {"perplexity": math.inf if row["perplexity"] is None else row["perplexity"]}

        return self._build_job(run, self._data_step.inputs, Evaluation(command, read_perplexity))

    @property
    def _text_folder(self) -> Path:
        return self.out / "text"

    def _write_text(self) -> Outputs:
        """Write the training and validation text, and return their numbers of words."""
        if self.text is None:
            text = None
            origin = f"the documentation in {corpus.find_python_library()}"  # in messages
            source = f"{origin}, Python {sys.version}"  # in the stamp
        else:
            text = corpus.read_text(self.text)
            origin = f"--text {self.text}"
            source = hashlib.sha256(text.encode("utf-8")).hexdigest()
        rules = [corpus.LEAST_WORDS, corpus.VALIDATION_SHARE, corpus.SPLIT_SEED]  # of the split
        inputs = {"source": source, "rules": rules, "version": __version__}
        folder = self._text_folder
        facts = Step(folder, inputs, lambda _: corpus.write_corpus(text, origin, folder)).do()
        say(
            f"text: {facts['words']:,} words in {facts['documents']:,} documents, of which "
            f"{facts['valid_words']:,} words are kept for validation"
        )
        return facts

    @cached_property
    def _data_step(self) -> Step:
        """The step that makes the data from the texts, which must have been written before."""
        texts = [self._text_folder / f"{part}.txt" for part in ("train", "valid")]
        inputs = {
            "text": [*map(checksum, texts)],
            "vocab_size": self.vocab_size,
            "version": __version__,
        }
        return Step(self.out / "data", inputs, self._make_data)

    def _make_data(self, context: RunContext) -> Outputs:
        """Learn the pieces, encode both texts and binarize them; return their numbers of tokens."""
        folder = self._data_step.folder
        binary = folder / "binary"
        say(f"text: learning {self.vocab_size:,} sentencepieces, then fairseq-preprocess")
        binary.mkdir()
        # All commands look for the tokenizer of a model beside its dictionary.
        tokenizer = binary / "sentencepiece.model"
        train = self._text_folder / "train.txt"
        corpus.train_pieces(train, tokenizer.with_suffix(""), self.vocab_size)
        command = ["fairseq-preprocess", "--only-source", "--destdir", str(binary)]
        tokens = {}
        for part in ("train", "valid"):
            text = self._text_folder / f"{part}.txt"
            pieces = folder / f"{part}.pieces"
            tokens[f"{part}_tokens"] = corpus.write_pieces(tokenizer, text, pieces)
            command += [f"--{part}pref", str(pieces)]
        run_logged(command, folder / "preprocess.log", context.lock)
        return tokens


TextResults = Results[TextExperiment]


def name_folder(run: Run) -> Path:
    """Name the folder of a run, relative to that of all runs."""
    return Path(run.variant.folder, f"lr-{run.condition}-seed-{run.seed}")


def option_value(family: str, train_args: Sequence[str], name: str) -> str:
    """Look up the last value of an option of ``TRAIN_OPTIONS``; empty if the user gave none."""
    words = [word for option in (*TRAIN_OPTIONS[family], *train_args) for word in option.split("=")]
    following = dict(zip(words, [*words[1:], ""]))  # the last of equal words wins, as in fairseq
    return following[name]


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
