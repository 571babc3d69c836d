"""The folder that training reads: windows in fairseq's mmap format, and where the answers are.

``SPLIT.bin`` and ``SPLIT.idx`` hold the windows, ``SPLIT.spans.npy`` the first and the last token
of each window's answer. The files of the vocabulary are there too, so predicting needs no other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.dictionary import DICTIONARY

MANIFEST = "manifest.json"
SYMBOLS = 4  # <s> question </s></s> context </s>


class Limits(NamedTuple):
    """Sizes in tokens; the defaults are those of BERT and RoBERTa.

    Attributes:
        max_length: of an input, with its four symbols.
        stride: from the beginning of a window to that of the next.
        max_question: longer questions lose their end.
    """

    max_length: int = 512
    stride: int = 128
    max_question: int = 64

    def check(self) -> None:
        """Refuse sizes that leave no room, or tokens of the context in no window.

        Raises:
            UserError: says which.
        """
        room = self.max_length - self.max_question - SYMBOLS
        if min(self.stride, self.max_question) < 1 or room < self.stride:
            raise UserError(
                f"--max-length {self.max_length} leaves {max(room, 0)} tokens of context beside a "
                f"question of {self.max_question}: --stride {self.stride} must be from 1 to that"
            )


class DataBin(NamedTuple):
    """What a folder says of itself.

    Attributes:
        path: the folder.
        version: of SQuAD.
        limits: sizes of its windows.
        train_windows: number of windows to train on.
    """

    path: Path
    version: str
    limits: Limits
    train_windows: int

    @property
    def dictionary(self) -> Path:
        """The path of fairseq's dictionary."""
        return self.path / DICTIONARY


def open_data_bin(path: Path) -> DataBin:
    """Read what a folder says of itself.

    Raises:
        UserError: it is no folder made by ``preprocess/squad.py``.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; preprocess/squad.py makes it")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        plan, windows = manifest["plan"], manifest["splits"]["train"]["windows"]
        return DataBin(path, plan["version"], Limits(**plan["limits"]), windows)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: was not made by preprocess/squad.py") from None
