"""The eight tasks of GLUE: files, columns, labels, and names in a submission.

GLUE's site also wants predictions for two sets that neither paper reports. The diagnostic set AX is
one more test set of MNLI's model. WNLI's development set contradicts its training set, so that
models are worse than chance: as usual since BERT, its majority class is handed in without training.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fairseq_posenc.errors import UserError

PROTOCOLS = ("m4m", "decbert")
# STS-B's largest score; models are trained on score / 5, as in fairseq's own recipe
SCORE_MAXIMUM = 5.0
_FILES = {"train": "train", "valid": "dev", "test": "test"}


class Task(NamedTuple):
    """A task of GLUE."""

    name: str  # name in the papers, and of its folder
    sentences: tuple[str, ...]  # columns with the text of one or two sentences
    label: str  # column of the label
    classes: tuple[str, ...]  # labels in the order of the model's outputs; empty for a score
    files: dict[str, str] = _FILES  # the `.tsv` of each split of the data-bin
    # names of GLUE's files for the test sets, in the order of `test`, `test1`; None for the
    # task's own name
    submitted: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()  # splits that are left out if their files are missing
    # columns of the splits whose files have no header
    headless: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    # whether some rows for training and development are known to miss columns; such rows are left
    # out and counted
    may_be_broken: bool = False

    @property
    def submission(self) -> tuple[str, ...]:
        """Names of GLUE's files for the test sets."""
        return self.submitted or (self.name,)

    @property
    def regression(self) -> bool:
        """Whether the label is a score."""
        return not self.classes

    @property
    def valid_splits(self) -> list[str]:
        """The development sets; the first one chooses the checkpoint."""
        return [split for split in self.files if split.startswith("valid")]

    @property
    def test_splits(self) -> list[str]:
        """The test sets, which have no labels."""
        return [split for split in self.files if split.startswith("test")]


_MNLI_FILES = {
    "train": "train",
    "valid": "dev_matched",
    "valid1": "dev_mismatched",
    "test": "test_matched",
    "test1": "test_mismatched",
    "test2": "../diagnostic/diagnostic",
}
_MNLI = ("entailment", "neutral", "contradiction")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_COLA_HEADLESS = {"train": _COLA_COLUMNS, "valid": _COLA_COLUMNS}
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_TASKS = (
    Task("MNLI", _PAIR, "gold_label", _MNLI, _MNLI_FILES, ("MNLI-m", "MNLI-mm", "AX"), ("test2",)),
    Task("QQP", ("question1", "question2"), "is_duplicate", _BINARY, may_be_broken=True),
    Task("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    Task("SST-2", ("sentence",), "label", _BINARY),
    Task("CoLA", ("sentence",), "label", _BINARY, headless=_COLA_HEADLESS),
    Task("STS-B", _PAIR, "score", ()),
    Task("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY),
    Task("RTE", _PAIR, "label", _ENTAILMENT),
)
TASKS = {task.name: task for task in _TASKS}
WNLI = Task("WNLI", _PAIR, "label", _BINARY)
# The files of a complete submission.
SUBMISSION = sorted(name for task in (*TASKS.values(), WNLI) for name in task.submission)


def parse_tasks(text: str) -> list[Task]:
    """Parse ``--tasks``: ``all``, or names separated by commas.

    Raises:
        UserError: a name is unknown, or stands there twice.
    """
    if text == "all":
        return list(TASKS.values())
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise UserError(
                f"--tasks {text}: unknown task {name!r}: choose from {', '.join(TASKS)}"
            )
    if len(set(names)) < len(names):
        raise UserError(f"--tasks {text}: a task is named twice")
    return [TASKS[name] for name in names]
