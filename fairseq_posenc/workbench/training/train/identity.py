"""What makes a run another one than others, and the name that its folder has from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError

NOTE, LAST = "run.txt", "checkpoint_last.pt"
_LONGEST = 100  # characters of a name, of the 255 that a file may have
_AS_WRITTEN = str.maketrans({"(": "-", ":": "-", ",": "-", "/": "-", ")": None, " ": None})
# Where a run goes on, how long, what it writes and how fast: not what comes out of it.
_SAME_RUN = (
    *("--restore-file", "--finetune-from-model", "--reset-", "--max-update", "--max-epoch"),
    *("--stop-time-hours", "--save-interval", "--keep-", "--no-epoch-checkpoints"),
    *("--validate-interval", "--disable-validation", "--log-", "--no-progress-bar"),
    *("--tensorboard-", "--wandb-", "--num-workers", "--position-backend"),
)


class Identity(NamedTuple):
    """A run, told apart from others.

    Attributes:
        recipe: its name.
        encoding: the spec, in its canonical form.
        data: a word for it.
        model: one of DecBERT's, or empty.
        changes: the user's options for fairseq-train that make it another run, with their values.
    """

    recipe: str
    encoding: str
    data: str
    model: str
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

    def lines(self) -> list[str]:
        """Return it as it is noted in the folder."""
        lines = [self.recipe, f"encoding {self.encoding}", f"data {self.data}"]
        lines += [f"model {self.model}"] if self.model else []
        return lines + [f"{key} {value}".strip() for key, value in self.changes.items()]

    def refuse_another(self, folder: Path) -> None:
        """Refuse a folder that has a checkpoint of another run.

        Raises:
            UserError: says what differs.
        """
        note = folder / NOTE
        if not ((folder / LAST).exists() and note.exists()):
            return
        kept, now = set(note.read_text(encoding="utf-8").splitlines()), set(self.lines())
        told = [f'it was started with "{line}"' for line in sorted(kept - now)]
        told += [f'this is with "{line}"' for line in sorted(now - kept)]
        if told:
            raise UserError(f"{folder} holds another run: {'; '.join(told)}; choose another --out")


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return a user's options for fairseq-train and their values; of one given twice, the last."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
    return options


def changes_of(words: Sequence[str]) -> dict[str, str]:
    """Return those that make another run, in the order of their names."""
    options = sorted(options_of(words).items())
    return {name: value for name, value in options if not name.startswith(_SAME_RUN)}


def _short(option: str, value: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return f"{name}={_plain(value.strip('()'))}" if value else name


def _plain(text: str) -> str:
    """Return a name without what shells and fairseq take for something else."""
    return text.translate(_AS_WRITTEN)
