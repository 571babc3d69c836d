"""Opens the folder that training reads: windows in fairseq's mmap format, and the answers' spans.

``SPLIT.bin`` and ``SPLIT.idx`` hold the windows, ``SPLIT.spans.npy`` the first and the last token
of each window's answer. The files of the vocabulary are there too, so predicting needs no other.
"""

import json
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.errors import UserError

MANIFEST = "manifest.json"
SYMBOLS = 4  # <s> question </s></s> context </s>


class Limits(NamedTuple):
    """Sizes in tokens; the defaults are those of BERT and RoBERTa."""

    max_length: int = 512  # maximum size of a window, with its four symbols
    stride: int = 128  # distance of the starts of two windows
    max_question: int = 64  # maximum size of a question; longer ones are cut

    def check(self) -> None:
        """Refuse sizes that leave no room for the context, or tokens of it in no window."""
        room = self.max_length - self.max_question - SYMBOLS
        if min(self.stride, self.max_question) < 1 or room < self.stride:
            raise UserError(
                f"--max-length {self.max_length} leaves {max(room, 0)} tokens of context beside a "
                f"question of {self.max_question}: --stride {self.stride} must be from 1 to that"
            )


class DataBin(NamedTuple):
    """A folder made by ``fairseq-posenc preprocess squad``."""

    path: Path  # the folder
    version: str  # version of SQuAD
    limits: Limits  # sizes of the windows
    train_windows: int  # number of training windows

    @property
    def dictionary(self) -> Path:
        """Path of fairseq's dictionary."""
        return self.path / DICTIONARY


def open_data_bin(path: Path) -> DataBin:
    """Open a folder.

    Raises:
        UserError: it is missing, or was made by another program.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; fairseq-posenc preprocess squad makes it")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        plan, windows = manifest["plan"], manifest["splits"]["train"]["windows"]
        return DataBin(path, plan["version"], Limits(**plan["limits"]), windows)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: was not made by fairseq-posenc preprocess squad") from None
