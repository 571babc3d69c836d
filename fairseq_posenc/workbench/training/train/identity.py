"""What the result of a training depends on: its data, recipe, encoding and changed options.

They name the folder of its checkpoints, and are the folder's stamp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.data_kind import check_kind

_LONGEST_NAME = 100  # characters, of the 255 that a file's name may have
_IN_FILE_NAMES = str.maketrans({**dict.fromkeys("(:,/", "-"), "*": "x", ")": None, " ": None})
# Options, by how they begin, that do not change a run's result: where it goes on, length, output,
# speed.
_SAME_RESULT = (
    *("--restore-file", "--finetune-from-model", "--reset-", "--max-update", "--max-epoch"),
    *("--stop-time-hours", "--save-interval", "--keep-", "--no-epoch-checkpoints"),
    *("--validate-interval", "--disable-validation", "--log-", "--no-progress-bar"),
    *("--tensorboard-", "--wandb-", "--num-workers", "--position-backend"),
)


class DataBins(NamedTuple):
    """One data-bin, or the shards of one."""

    path: str  # path of the folder, or of several, joined by colons
    name: str  # name of the folder


def find_data(given: str, pairs: bool = False) -> DataBins:
    """Find the data of a training: a data-bin, several joined by colons, or a folder of shards.

    Args:
        given: the user's word.
        pairs: whether the training is a translation, which reads pairs of sentences.

    Raises:
        UserError: there is no such folder, or one that is not a data-bin, not finished, of another
            task, or of another dictionary than the first; or shards are missing.
    """
    if ":" in given and Path(given).is_dir():
        raise UserError(f"{given}: fairseq splits names at ':'; rename the folder")
    folders = [Path(part) for part in given.split(":")]
    name = folders[0].parent.name if len(folders) > 1 else folders[0].absolute().name
    if shards := sorted(path for path in folders[0].glob("shard*") if path.is_dir()):
        folders = shards
    for folder in folders:
        _check_data_bin(folder, folders[0], pairs)
        whole = folder.name.rpartition("-of-")[2]  # shard00-of-16 is one of 16
        if whole.isdigit() and int(whole) != len(folders):
            raise UserError(f"{folder} is one of {whole} shards, and {len(folders)} are given")
    return DataBins(":".join(map(str, folders)), name)


def _check_data_bin(folder: Path, first: Path, pairs: bool) -> None:
    if folder.suffix == ".partial":
        raise UserError(f"{folder} is not finished: start its preprocessing again")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not any(folder.glob("dict*.txt")):
        raise UserError(f"{folder} is not a data-bin folder: it has no dict.txt")
    check_kind(folder, pairs, "this recipe")
    for path in sorted(folder.glob("dict*.txt")):
        other = first / path.name
        if not other.exists() or path.read_bytes() != other.read_bytes():
            raise UserError(f"{path} differs from that of {first}: its numbers mean other tokens")


class RunIdentity(NamedTuple):
    """Everything that the result of a training depends on; it names the folder."""

    recipe: str  # name of the recipe
    encoding: str  # spec in its canonical form
    data: str  # name of the data's folder
    model: str  # one of DecBERT's, or empty
    changes: dict[str, str]  # the user's options for fairseq-train that change the result

    @property
    def folder(self) -> Path:
        """The folder of its checkpoints: ``b_small/wiki/decbert_same-none--lr=2e-4``."""
        name = _escape(f"{self.model}-{self.encoding}" if self.model else self.encoding)
        changes = [_format_change(option, value) for option, value in self.changes.items()]
        if len(",".join(changes)) > _LONGEST_NAME:
            digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
            changes = [f"{len(changes)}-changes-{digest}"]
        # Not commas, which separate paths in other commands.
        return Path("checkpoints", self.recipe, self.data, "--".join([name, *changes]))


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parse options for fairseq-train into their values; of one given twice, the last counts."""
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
    """Select the options that change a run's result, sorted by name."""
    return {name: options[name] for name in sorted(options) if not name.startswith(_SAME_RESULT)}


def _format_change(option: str, value: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return f"{name}={_escape(value.strip('()'))}" if value else name


def _escape(text: str) -> str:
    """Replace the characters that shells and fairseq treat specially."""
    return text.translate(_IN_FILE_NAMES)
