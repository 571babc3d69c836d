"""Opens the data-bin of SQuAD, which ``fairseq-posenc preprocess squad`` writes.

``SPLIT.bin`` and ``SPLIT.idx`` hold the windows in fairseq's mmap format, ``SPLIT.spans.npy`` the
first and the last token of each window's answer. The folder also holds the vocabulary's files.
"""

import json
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, MANIFEST
from fairseq_posenc.errors import UserError

SPECIAL_SYMBOLS = 4  # of a window: <s> question </s></s> context </s>


class Limits(NamedTuple):
    """Sizes in tokens; by default a window as in RoBERTa, stride and question as in BERT."""

    max_length: int = 512  # maximum size of a window, with its four special symbols
    stride: int = 128  # distance from the start of a window to that of the next
    max_question: int = 64  # maximum size of a question; longer ones are cut

    def check(self) -> None:
        """Refuse sizes that leave no room for the context, or a stride that skips tokens of it."""
        if self.max_length < SPECIAL_SYMBOLS + 2:  # a token of the question, one of the context
            raise UserError(f"--max-length {self.max_length}: give {SPECIAL_SYMBOLS + 2} or more")
        room = self.max_length - SPECIAL_SYMBOLS
        if not 1 <= self.max_question < room:
            raise UserError(
                f"--max-question {self.max_question}: give 1 to {room - 1}, as --max-length "
                f"{self.max_length} leaves {room} tokens of context and question"
            )
        rest = room - self.max_question
        if not 1 <= self.stride <= rest:
            raise UserError(
                f"--stride {self.stride}: give 1 to {rest}, as --max-length {self.max_length} "
                f"leaves {rest} tokens of context beside a question of {self.max_question}"
            )


class SquadDataBin(NamedTuple):
    """A folder made by ``fairseq-posenc preprocess squad``."""

    path: Path
    version: str  # of SQuAD: `1.1` or `2.0`
    limits: Limits
    train_windows: int  # number of training windows

    @property
    def dictionary(self) -> Path:
        """Path of fairseq's dictionary."""
        return self.path / DICTIONARY

    def check_lengths(self, max_positions: int, model: object) -> None:
        """Refuse windows that are too long for a model, whose name or path is ``model``."""
        if self.limits.max_length > max_positions:
            raise UserError(
                f"{self.path} has windows of {self.limits.max_length} tokens, but {model} has "
                f"{max_positions} positions: make the data with --max-length {max_positions} "
                f"--max-question {max_positions // 4} --stride {max_positions // 4}"  # both fit
            )


def open_data_bin(path: Path) -> SquadDataBin:
    """Open a folder; refuse one that is missing, was made by something else, or cannot be read."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; fairseq-posenc preprocess squad makes it")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        plan = manifest["plan"]
        windows = manifest["splits"]["train"]["windows"]
        return SquadDataBin(path, plan["version"], Limits(**plan["limits"]), windows)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fault = f"was not made by fairseq-posenc preprocess squad ({error})"
        raise UserError(f"{path}: {fault}") from None
