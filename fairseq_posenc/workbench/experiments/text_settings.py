"""Settings of the experiments that train language models on a text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.experiments.experiment import RESERVED, ExperimentSettings
from fairseq_posenc.workbench.experiments.variants import CAUSAL, MASKED, Run

# Small enough that two processor cores train a model in minutes, large enough that the loss
# leaves the level of a bag of words. Dropout would only slow down runs that see each text a few
# times. The schedule does not depend on the length of the run, so a longer run continues a shorter.
# By default fairseq cuts the last batch to a multiple of 8 and drops the rest, in validation too.
_OPTIONS = """
--task {task} --criterion {criterion} --sample-break-mode none --tokens-per-sample 64
--max-tokens 3072 --required-batch-size-multiple 1 --arch {arch}
--{stack}-layers 2 --{stack}-embed-dim 128 --{stack}-ffn-embed-dim 512 --{stack}-attention-heads 4
--dropout 0 --attention-dropout 0 --optimizer adam --adam-betas '(0.9, 0.98)'
--lr-scheduler inverse_sqrt --warmup-updates 200
"""
TASKS = {MASKED: "masked_lm", CAUSAL: "language_modeling"}
# the stack's name in fairseq's options, such as --encoder-layers
STACKS = {MASKED: "encoder", CAUSAL: "decoder"}
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
class TextSettings(ExperimentSettings):
    """The user's choices for language models that learn a text."""

    case: ClassVar[str] = "learning rate"  # what `Run.case` is
    reserved: ClassVar[Mapping[str, str]] = {**RESERVED, "--lr": "use --lrs"}
    family: str = MASKED
    text: Optional[Path] = None  # the user's text file, or None for Python's own documentation
    eval_length: int = 0  # length in tokens at which models are evaluated; 0 for that of training
    # learning rates; a model is trained with each and compared by its best one
    lrs: tuple[str, ...] = (LEARNING_RATE,)
    vocab_size: int  # number of sentencepieces

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < _MIN_VOCAB_SIZE:
            raise UserError(f"--vocab-size {self.vocab_size}: must be at least {_MIN_VOCAB_SIZE}")
        for lr in self.lrs:
            if not _is_rate(lr):
                raise UserError(f"--lrs {','.join(self.lrs)}: write numbers, as in 0.001,0.003")
        layers = self.size("layers")
        for variant in self.variants if layers.isdigit() else ():
            parse(variant.position_encoding).check_length(int(layers))

    @property
    def runs(self) -> list[Run]:
        """The trainings: each model with each learning rate and seed."""
        pairs = [(variant, lr) for variant in self.variants for lr in self.lrs]
        return [Run(variant, seed, lr) for seed in self.seeds for variant, lr in pairs]

    def folder(self, run: Run) -> Path:
        """Name the folder of a model's checkpoints and log."""
        return self.out / "models" / run.variant.folder / f"lr-{run.case}-seed-{run.seed}"

    def data(self, run: Optional[Run] = None) -> Path:
        """Name the data-bin, the same for all models."""
        return self.out / "data" / "binary"

    def options(self, run: Run) -> list[str]:
        """List the options of ``fairseq-train`` that define the model and what it learns."""
        ours = (*TRAIN_OPTIONS[self.family], *run.variant.options)
        return [*ours, *self.train_args, "--lr", run.case]

    def option(self, name: str) -> str:
        """Look up the value that ``fairseq-train`` gets for an option."""
        return option_value(self.family, self.train_args, name)

    def size(self, name: str) -> str:
        """Look up a size of the stack, as in ``embed-dim``."""
        return self.option(f"--{STACKS[self.family]}-{name}")

    @property
    def trained(self) -> int:
        """The length of training, in tokens."""
        return int(self.option("--tokens-per-sample"))


def option_value(family: str, train_args: Sequence[str], name: str) -> str:
    """Look up the value of an option of ``fairseq-train``; where it is given twice, the last."""
    words = [word for each in (*TRAIN_OPTIONS[family], *train_args) for word in each.split("=")]
    return words[len(words) - words[::-1].index(name)]


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
