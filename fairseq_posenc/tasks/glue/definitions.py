"""The eight tasks: their files, columns, labels, and what GLUE wants back.

Neither paper reports the other two sets, and GLUE's site wants predictions for them all the same.
The diagnostic set AX is one more test set of MNLI's model. WNLI's development set contradicts its
training set, so that models are worse than chance; what is usual since BERT is done here too: its
majority class is handed in, and nothing is trained.
"""

from __future__ import annotations

from typing import NamedTuple

from fairseq_posenc.errors import UserError

PROTOCOLS = ("m4m", "decbert")
SCORE_MAXIMUM = 5.0  # of STS-B; models are trained on score / 5, as in fairseq's own recipe


class Task(NamedTuple):
    """A task of GLUE.

    Attributes:
        name: as the papers write it, and as its folder is called.
        sentences: columns with the text of one or two sentences.
        label: column of the label.
        classes: the labels in the order of the model's outputs; empty for a score.
        files: which ``.tsv`` each split of the data-bin is made from.
        submission: names of GLUE's files for the test sets, in the order of ``test``, ``test1``.
        optional: splits that are left out if their files are not there.
        headless: columns of the files that have no header, by split.
        may_be_broken: whether rows with missing columns are known in training and development data;
            such rows are left out and counted.
    """

    name: str
    sentences: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    files: dict[str, str]
    submission: tuple[str, ...]
    optional: tuple[str, ...]
    headless: dict[str, tuple[str, ...]]
    may_be_broken: bool

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


_FILES = {"train": "train", "valid": "dev", "test": "test"}
_MNLI_FILES = {
    "train": "train",
    "valid": "dev_matched",
    "valid1": "dev_mismatched",
    "test": "test_matched",
    "test1": "test_mismatched",
    "test2": "../diagnostic/diagnostic",
}
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_COLA_HEADLESS: dict[str, tuple[str, ...]] = {"train": _COLA_COLUMNS, "valid": _COLA_COLUMNS}
_NO, _YES = "0", "1"
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")


def _task(
    name: str,
    sentences: tuple[str, ...],
    label: str,
    classes: tuple[str, ...],
    *,
    files: dict[str, str] = _FILES,
    submission: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    headless: dict[str, tuple[str, ...]] | None = None,
    may_be_broken: bool = False,
) -> Task:
    return Task(
        *(name, sentences, label, classes, files, submission or (name,), optional),
        headless=headless or {},
        may_be_broken=may_be_broken,
    )


TASKS = {
    task.name: task
    for task in (
        _task(
            "MNLI",
            _PAIR,
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            files=_MNLI_FILES,
            submission=("MNLI-m", "MNLI-mm", "AX"),
            optional=("test2",),
        ),
        _task("QQP", ("question1", "question2"), "is_duplicate", (_NO, _YES), may_be_broken=True),
        _task("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
        _task("SST-2", ("sentence",), "label", (_NO, _YES)),
        _task("CoLA", ("sentence",), "label", (_NO, _YES), headless=_COLA_HEADLESS),
        _task("STS-B", _PAIR, "score", ()),
        _task("MRPC", ("#1 String", "#2 String"), "Quality", (_NO, _YES)),
        _task("RTE", _PAIR, "label", _ENTAILMENT),
    )
}
WNLI = _task("WNLI", _PAIR, "label", (_NO, _YES))
# What GLUE's site wants in one zip.
SUBMISSION = sorted(name for task in (*TASKS.values(), WNLI) for name in task.submission)


def parse_tasks(text: str) -> list[Task]:
    """Return the tasks that ``--tasks`` names: ``all``, or names separated by commas.

    Raises:
        UserError: there is no such task, or one is named twice.
    """
    if text == "all":
        return list(TASKS.values())
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise UserError(f"--tasks {text}: {name!r} is none of {', '.join(TASKS)}")
    if len(set(names)) < len(names):
        raise UserError(f"--tasks {text}: a task is named twice")
    return [TASKS[name] for name in names]
