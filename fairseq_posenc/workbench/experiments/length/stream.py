"""The text that is scored, all tokens of a split in a row, and the windows in which it is read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from torch import Tensor

from fairseq_posenc.errors import UserError


class Stream(NamedTuple):
    """What a model reads and what it predicts."""

    # `(N,)`, the token before each target. Before the first one it is the end of sentence, as
    # fairseq has it in training, so the first token is predicted like others
    inputs: Tensor
    targets: Tensor  # `(N,)`, every token of the split, ends of sentences included

    @classmethod
    def from_tokens(cls, tokens: Tensor, eos: int) -> Stream:
        """Build the stream of ``tokens``, ``(N,)``."""
        return cls(torch.cat([tokens.new_tensor([eos]), tokens[:-1]]), tokens)

    def __len__(self) -> int:
        """Count the tokens, N."""
        return len(self.targets)


def read_dictionary(data: Path) -> Dictionary:
    """Read the dictionary of a folder that ``fairseq-preprocess --only-source`` made.

    Raises:
        UserError: the data do not exist.
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
        UserError: the folder has no such split, it is empty or damaged, or of another dictionary.
    """
    dataset = load_indexed_dataset(str(data / split), dictionary)
    if dataset is None or not sum(dataset.sizes):
        splits = ", ".join(sorted(path.stem for path in data.glob("*.idx"))) or "none"
        raise UserError(f"--split {split}: {data} has no tokens of it; its splits: {splits}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))]).long()
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < len(dictionary):
            raise UserError(
                f"{data / split}.bin: has a token {token:,}, and dict.txt has {len(dictionary):,} "
                "symbols; name the dictionary that the text was preprocessed with"
            )
    return Stream.from_tokens(tokens, dictionary.eos())


class Window(NamedTuple):
    """A piece of the stream: read from ``start``, predicted from ``scored``, up to ``end``."""

    start: int
    scored: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many tokens are read, and how many of them are predicted."""
        return self.end - self.start, self.end - self.scored


def cut_windows(total: int, length: int, stride: int) -> Iterator[Window]:
    """Cut a stream so that every token is predicted exactly once.

    A window reads at most ``length`` tokens and predicts the last ``stride`` of them, so each has
    at least ``length - stride`` tokens of context, as far as the stream has them. With a stride of
    ``length`` that is the non-overlapping evaluation.

    Source:
        Press et al. (2022), "ALiBi", arXiv:2108.12409, appendix B; the windows are those of
        ``fairseq-eval-lm --context-window (length - stride)``.
    """
    for scored in range(0, total, stride):
        yield Window(max(0, scored - length + stride), scored, min(scored + stride, total))


def batch_windows(pieces: Iterator[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Put neighbours of equal shape together, up to ``max_tokens`` tokens, or else one by one."""
    for (read, _), alike in groupby(pieces, key=lambda window: window.shape):
        while batch := list(islice(alike, max(1, max_tokens // read))):
            yield batch
