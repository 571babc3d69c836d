"""Identifies a training by all that its result depends on: data, recipe, encoding, changed options.

The identity names the folder of the checkpoints, and is the folder's stamp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.data_kind import check_kind

_LONGEST_NAME = 100  # characters for changed options; a file name may have 255
_IN_FILE_NAMES = str.maketrans({**dict.fromkeys("(:,/", "-"), "*": "x", ")": None, " ": None})
# Beginnings of options that do not change the result of an update: they are about the start, the
# length, output and speed.
_SAME_RESULT = (
    *("--restore-file", "--finetune-from-model", "--reset-", "--max-update", "--max-epoch"),
    *("--stop-time-hours", "--save-interval", "--keep-", "--no-epoch-checkpoints"),
    *("--validate-interval", "--disable-validation", "--log-", "--no-progress-bar"),
    *("--tensorboard-", "--wandb-", "--num-workers", "--position-backend"),
)


class TrainingData(NamedTuple):
    """The data of a training: a data-bin, or its shards."""

    path: str  # path of the folder; those of several shards are joined by colons
    name: str  # name of the folder


def find_data(paths: str, pairs: bool = False) -> TrainingData:
    """Find the data of a training: a data-bin, several joined by colons, or a folder of shards.

    Args:
        paths: the user's argument.
        pairs: whether the training is a translation, which reads pairs of sentences.

    Raises:
        UserError: a folder does not exist, is not a data-bin, is not finished, or is for another
            task or dictionary; or shards are missing.
    """
    if ":" in paths and Path(paths).is_dir():
        raise UserError(f"{paths}: fairseq splits names at ':'; rename the folder")
    folders = [Path(path) for path in paths.split(":")]
    name = folders[0].parent.name if len(folders) > 1 else folders[0].absolute().name
    if shards := sorted(path for path in folders[0].glob("shard*") if path.is_dir()):
        folders = shards
    for folder in folders:
        _check_data_bin(folder, folders[0], pairs)
        total = folder.name.rpartition("-of-")[2]  # a name such as shard00-of-16
        if total.isdigit() and int(total) != len(folders):
            raise UserError(f"{folder} is one of {total} shards, but there are {len(folders)}")
    return TrainingData(":".join(map(str, folders)), name)


def _check_data_bin(folder: Path, first: Path, pairs: bool) -> None:
    if folder.suffix == ".partial":
        raise UserError(f"{folder} is not finished: start its preprocessing again")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not any(folder.glob("dict*.txt")):
        raise UserError(f"{folder} is not a data-bin folder: it has no dict.txt")
    check_kind(folder, pairs, "this recipe")
    for path in sorted(folder.glob("dict*.txt")):
        other = first / path.name
        if not other.exists() or path.read_bytes() != other.read_bytes():
            raise UserError(f"{path} differs from that of {first}: all need the same dictionary")


class RunIdentity(NamedTuple):
    """Everything that the result of a training depends on; names the folder."""

    recipe: str  # name of the recipe
    encoding: str  # spec in its canonical form
    data: str  # name of the data's folder
    model: str  # name of one of DecBERT's models, or empty
    changes: dict[str, str]  # the user's options for fairseq-train that change the result

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints, such as ``b_small/wiki/decbert_same-none--lr=2e-4``."""
        name = _escape(f"{self.model}-{self.encoding}" if self.model else self.encoding)
        changes = [_format_change(option, value) for option, value in self.changes.items()]
        if len(",".join(changes)) > _LONGEST_NAME:
            digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
            changes = [f"{len(changes)}-changes-{digest}"]
        # Not joined by commas, which separate paths in other commands.
        return Path("checkpoints", self.recipe, self.data, "--".join([name, *changes]))


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parse options for fairseq-train into values by name; the last of repeated ones counts."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
    return options


def select_changes(options: Mapping[str, str]) -> dict[str, str]:
    """Select the options that change the result of a training, sorted by name."""
    return {name: options[name] for name in sorted(options) if not name.startswith(_SAME_RESULT)}


def _format_change(option: str, value: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return f"{name}={_escape(value.strip('()'))}" if value else name


def _escape(text: str) -> str:
    """Replace the characters that shells and fairseq treat specially."""
    return text.translate(_IN_FILE_NAMES)
