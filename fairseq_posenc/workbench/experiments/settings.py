"""What a comparison is made of: the user's choices and the sizes of its models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.variants import Variant, refuse_directions

# Or fairseq leaves out what remains of the last batch after a multiple of 8, in a score too.
WHOLE = ("--required-batch-size-multiple", "1")

MASKED, CAUSAL = "masked-lm", "causal-lm"

# Small enough that two processor cores train a model in minutes, large enough that the loss
# leaves the level of a bag of words. Dropout would only slow down runs that see each text a few
# times. The schedule does not depend on the length of the run, so a longer run continues a shorter.
_DATA = ("--sample-break-mode", "none", "--tokens-per-sample", "64", "--max-tokens", "3072", *WHOLE)
_LEARNING = (
    *("--dropout", "0", "--attention-dropout", "0"),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "200"),
)


def _sizes(stack: str) -> tuple[str, ...]:
    return (
        *(f"--{stack}-layers", "2", f"--{stack}-embed-dim", "128"),
        *(f"--{stack}-ffn-embed-dim", "512", f"--{stack}-attention-heads", "4"),
    )


TASKS = {MASKED: "masked_lm", CAUSAL: "language_modeling"}
STACKS = {MASKED: "encoder", CAUSAL: "decoder"}  # which has the layers, in names of options
TRAIN_OPTIONS = {
    MASKED: (
        *("--task", TASKS[MASKED], "--criterion", "masked_lm", *_DATA),
        *("--arch", "roberta_none_tiny", *_sizes(STACKS[MASKED]), *_LEARNING),
    ),
    CAUSAL: (
        *("--task", TASKS[CAUSAL], "--criterion", "cross_entropy", *_DATA),
        *("--arch", "transformer_lm_none_tiny", *_sizes(STACKS[CAUSAL]), *_LEARNING),
    ),
}

LEARNING_RATE = "0.003"
_FEWEST = 16  # sentencepieces

# Options that the comparison sets itself, and what to use in their place.
RESERVED = {
    "--max-update": "use --updates",
    "--max-epoch": "use --updates",
    "--seed": "use --seeds",
    "--position-encoding": "use --encodings",
    "--attention-directions": "use --encodings",
    "--lr": "use --lrs",
    "--save-dir": "use --out",
    "--user-dir": "it is set already",
    "--task": "use --family",
    "--log-format": "the learning curves are read from the log",
    "--log-file": "the log is kept already",
}


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        out: folder for all results.
        text: the user's text file, or None for Python's own documentation.
        contenders: the models to compare.
        updates: number of training updates of each model.
        seeds: of initial weights, order of the data and masks; one training of each model for each.
        family: one of ``TRAIN_OPTIONS``.
        read: length at which a model is measured, in tokens, where it is not that of training.
        lrs: learning rates, at the best of which a model is judged; one for each training.
        vocab_size: number of sentencepieces.
        points: of a learning curve, so validations of a training.
        train_args: options added to those of ``fairseq-train``; they win over the demo's.
    """

    out: Path
    text: Optional[Path]
    contenders: tuple[Variant, ...]
    updates: int
    seeds: tuple[int, ...]
    vocab_size: int
    family: str = MASKED
    read: int = 0
    lrs: tuple[str, ...] = (LEARNING_RATE,)
    points: int = 16
    train_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.vocab_size < _FEWEST:
            raise UserError(f"--vocab-size {self.vocab_size}: must be at least {_FEWEST}")
        if self.family == CAUSAL:
            refuse_directions(self.contenders)
        for lr in self.lrs:
            if not _is_rate(lr):
                raise UserError(f"--lrs {','.join(self.lrs)}: write numbers, as in 0.001,0.003")
        if self.train_args and not self.train_args[0].startswith("-"):
            raise UserError(f"{self.train_args[0]!r} is not an option; the folder is --out's")
        for argument in self.train_args:
            option = argument.split("=")[0]
            if option in RESERVED:
                raise UserError(f"-- {argument}: {option} cannot be set here; {RESERVED[option]}")

    def option(self, name: str) -> str:
        """Look up the value that ``fairseq-train`` gets for an option."""
        return option_value(self.family, self.train_args, name)

    def size(self, name: str) -> str:
        """Return the value of an option of the layers, as in ``embed-dim``."""
        return self.option(f"--{STACKS[self.family]}-{name}")

    @property
    def trained(self) -> int:
        """The length of training, in tokens."""
        return int(self.option("--tokens-per-sample"))

    @property
    def validate_every(self) -> int:
        """Updates between two points of a learning curve."""
        return max(1, self.updates // self.points)


def option_value(family: str, train_args: Sequence[str], name: str) -> str:
    """Look up the value of an option of ``fairseq-train`` in a comparison."""
    words = [word for each in (*TRAIN_OPTIONS[family], *train_args) for word in each.split("=")]
    return words[len(words) - words[::-1].index(name)]


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
