"""The identity of a run: what its result depends on, and its folder's name from that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LAST = "checkpoint_last.pt"
_LONGEST = 100  # characters of a name, of the 255 that a file may have
_AS_WRITTEN = str.maketrans({**dict.fromkeys("(:,/", "-"), "*": "x", ")": None, " ": None})
# Where a run continues, its length, output and speed: these do not change its result.
_SAME_RUN = (
    *("--restore-file", "--finetune-from-model", "--reset-", "--max-update", "--max-epoch"),
    *("--stop-time-hours", "--save-interval", "--keep-", "--no-epoch-checkpoints"),
    *("--validate-interval", "--disable-validation", "--log-", "--no-progress-bar"),
    *("--tensorboard-", "--wandb-", "--num-workers", "--position-backend"),
)


class Identity(NamedTuple):
    """What the result of a run depends on."""

    recipe: str  # its name
    encoding: str  # the spec, in its canonical form
    data: str  # a word for it
    model: str  # one of DecBERT's, or empty
    # the user's options for fairseq-train that change its result, with their values
    changes: dict[str, str]

    @property
    def folder(self) -> Path:
        """The folder of its checkpoints: ``b_small/wiki/decbert_same-none--lr=2e-4``."""
        name = _plain(f"{self.model}-{self.encoding}" if self.model else self.encoding)
        changes = [_short(option, value) for option, value in self.changes.items()]
        if len(",".join(changes)) > _LONGEST:
            digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
            changes = [f"{len(changes)}-changes-{digest}"]
        parent = Path("checkpoints", self.recipe, self.data)
        new, old = (parent / separator.join([name, *changes]) for separator in ("--", ","))
        # Older folders have commas, which separate paths in other commands.
        return old if old.exists() and not new.exists() else new


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


def changed_options(words: Sequence[str]) -> dict[str, str]:
    """Select the options that change a run's result, sorted by name."""
    options = sorted(parse_options(words).items())
    return {name: value for name, value in options if not name.startswith(_SAME_RUN)}


def _short(option: str, value: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return f"{name}={_plain(value.strip('()'))}" if value else name


def _plain(text: str) -> str:
    """Replace the characters that shells and fairseq treat specially."""
    return text.translate(_AS_WRITTEN)
