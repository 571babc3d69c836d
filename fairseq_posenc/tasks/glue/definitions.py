"""Defines the eight GLUE tasks that are trained: files, columns, labels, names in a submission.

GLUE's site also expects predictions for two sets that the papers do not report. The diagnostic
set AX is one more test set for MNLI's model. WNLI's development set contradicts its training set,
so models do worse than chance: as usual since BERT, the majority class is submitted for it.
"""

from typing import NamedTuple

from fairseq_posenc.errors import UserError

# The largest score of STS-B; models are trained on score / 5, as in fairseq's recipe.
SCORE_MAXIMUM = 5.0
_FILES = {"train": "train", "valid": "dev", "test": "test"}


class Task(NamedTuple):
    """A task of GLUE."""

    name: str  # as in the papers; also the name of its folder
    sentences: tuple[str, ...]  # columns with the text: one or two sentences
    label: str  # column of the label
    classes: tuple[str, ...]  # labels in the order of the model's outputs; empty for a score
    files: dict[str, str] = _FILES  # split of the data-bin -> name of its `.tsv`
    # names of the submitted files for `test`, `test1`, ...; empty for the task's own name
    submitted: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # splits that are left out if their files do not exist
    # columns of training and development files that have no header line
    headless: tuple[str, ...] = ()
    # whether some training and development rows lack columns; such rows are skipped and counted
    may_be_broken: bool = False

    @property
    def submission(self) -> tuple[str, ...]:
        """Names of the submitted files, one for each test set."""
        return self.submitted or (self.name,)

    def config_name(self, protocol: str) -> str:
        """Name its YAML file by a paper's protocol, such as ``decbert_cola``."""
        return f"{protocol}_{self.name.lower().replace('-', '')}"

    @property
    def regression(self) -> bool:
        """Whether the label is a score."""
        return not self.classes

    @property
    def valid_splits(self) -> list[str]:
        """The development sets; the best checkpoint is chosen on the first."""
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
_MNLI_CLASSES = ("entailment", "neutral", "contradiction")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_TASKS = (
    Task(
        "MNLI",
        _PAIR,
        "gold_label",
        _MNLI_CLASSES,
        _MNLI_FILES,
        submitted=("MNLI-m", "MNLI-mm", "AX"),
        optional=("test2",),
    ),
    Task("QQP", ("question1", "question2"), "is_duplicate", _BINARY, may_be_broken=True),
    Task("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    Task("SST-2", ("sentence",), "label", _BINARY),
    Task("CoLA", ("sentence",), "label", _BINARY, headless=_COLA_COLUMNS),
    Task("STS-B", _PAIR, "score", classes=()),
    Task("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY),
    Task("RTE", _PAIR, "label", _ENTAILMENT),
)
TASKS = {task.name: task for task in _TASKS}
WNLI = Task("WNLI", _PAIR, "label", _BINARY)
# The files of a complete submission.
SUBMISSION = sorted(name for task in (*TASKS.values(), WNLI) for name in task.submission)


def name_column(task: str, metric: str) -> tuple[str, str]:
    """Name the papers' column and metric: MNLI-mm and accuracy for MNLI's ``accuracy_mm``."""
    name, _, split = metric.partition("_")
    return (f"{task}-{split}" if split else task), name


def parse_tasks(text: str) -> list[Task]:
    """Parse ``--tasks``: ``all``, or names separated by commas.

    Raises:
        UserError: a name is unknown or named twice.
    """
    if text == "all":
        return list(TASKS.values())
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise UserError(f"--tasks {text}: unknown task {name!r}: choose {', '.join(TASKS)}")
    if len(set(names)) < len(names):
        raise UserError(f"--tasks {text}: a task is named twice")
    return [TASKS[name] for name in names]
