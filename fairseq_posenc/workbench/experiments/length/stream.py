"""The text that is scored: all tokens of a split, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from torch import Tensor

from fairseq_posenc.errors import UserError


class Stream(NamedTuple):
    """What a model reads and what it predicts.

    Attributes:
        inputs: ``(N,)``, the token before each target. Before the first one it is the end of
            sentence, as fairseq has it in training, so the first token is predicted like others.
        targets: ``(N,)``, every token of the split, ends of sentences included.
    """

    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, tokens: Tensor, eos: int) -> Stream:
        """Build the stream of ``tokens``, ``(N,)``."""
        return cls(torch.cat([tokens.new_tensor([eos]), tokens[:-1]]), tokens)

    def __len__(self) -> int:
        """Count the tokens, N."""
        return len(self.targets)


def read_dictionary(data: Path) -> Dictionary:
    """Read the dictionary of a folder that ``fairseq-preprocess --only-source`` made.

    Raises:
        UserError: there is none.
    """
    path = data / "dict.txt"
    if not path.is_file():
        raise UserError(
            f"--data {data}: {path} does not exist; name a folder that fairseq-preprocess "
            "--only-source made"
        )
    return Dictionary.load(str(path))


def read_stream(data: Path, split: str, dictionary: Dictionary) -> Stream:
    """Read all tokens of a split.

    Raises:
        UserError: the folder has no such split, or it is empty.
    """
    dataset = load_indexed_dataset(str(data / split), dictionary)
    if dataset is None or not len(dataset):
        found = ", ".join(sorted(path.stem for path in data.glob("*.idx"))) or "none"
        raise UserError(f"--split {split}: {data} has no tokens of it; its splits: {found}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))])
    return Stream.of(tokens.long(), dictionary.eos())
