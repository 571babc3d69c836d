"""What a probe is made of: the user's choices and the sizes of its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.probe.data import ANSWER, BOTH, CAUSAL, QUESTION
from fairseq_posenc.workbench.experiments.probe.tasks import Task
from fairseq_posenc.workbench.experiments.variants import Variant, refuse_directions

POSITIONS = 1024  # of the models' tables, read or not; a text is at most twice a question, and ends
LONGEST = 500

# Or fairseq leaves out what remains of the last batch after a multiple of 8, in a score too.
WHOLE = ("--max-tokens", "4096", "--required-batch-size-multiple", "1")

# Small enough that a training takes at most two minutes on a core, large enough to learn the tasks
# at the lengths trained on.
_COMMON = (
    *("--criterion", "answers", *WHOLE),
    *("--dropout", "0", "--attention-dropout", "0", "--max-target-positions", str(POSITIONS)),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
    *("--lr", "0.003", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "100"),
    *("--update-epoch-batch-itr", "True"),  # or a resumed training draws other batches
)
TASKS = {
    CAUSAL: ("--task", "language_modeling"),
    BOTH: ("--task", "translation", "--source-lang", QUESTION, "--target-lang", ANSWER),
}
TRAIN_OPTIONS = {
    CAUSAL: (
        *(*TASKS[CAUSAL], "--arch", "transformer_lm_none_tiny", "--sample-break-mode", "eos"),
        *("--tokens-per-sample", str(POSITIONS), "--decoder-ffn-embed-dim", "256"),
        *_COMMON,
    ),
    BOTH: (
        *(*TASKS[BOTH], "--arch", "transformer_none_tiny", "--max-source-positions"),
        *(str(POSITIONS), "--encoder-ffn-embed-dim", "256", "--decoder-ffn-embed-dim", "256"),
        *_COMMON,
    ),
}


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        out: folder for all results.
        family: one of ``TASKS``.
        tasks: what is learned.
        contenders: the models to compare.
        seeds: of initial weights and order of the data; one training for each.
        updates: number of training updates of each model.
        trained: the longest questions that are trained on.
        lengths: the lengths that are read.
    """

    out: Path
    family: str
    tasks: tuple[Task, ...]
    contenders: tuple[Variant, ...]
    seeds: tuple[int, ...]
    updates: int
    trained: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for option, value in (("--trained", self.trained), ("--lengths", max(self.lengths))):
            if value > LONGEST:
                raise UserError(f"{option} {value}: must be at most {LONGEST:,}")
        if self.family == CAUSAL:
            refuse_directions(self.contenders)
