"""The text that is scored, all tokens in a row, and the windows in which it is read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor


class Stream(NamedTuple):
    """What a model reads and what it predicts."""

    # `(N,)`, the token before each target. Before the first one it is that with which texts begin
    # in training, of fairseq the end of a sentence, so the first token is predicted like others
    inputs: Tensor
    targets: Tensor  # `(N,)`, every token of the text, ends of sentences included

    @classmethod
    def from_tokens(cls, tokens: Tensor, start: int) -> Stream:
        """Build the stream of ``tokens``, ``(N,)``, that follow the token ``start``."""
        return cls(torch.cat([tokens.new_tensor([start]), tokens[:-1]]), tokens)

    def __len__(self) -> int:
        """Count the tokens, N."""
        return len(self.targets)


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


def spread_windows(
    total: int, length: int, stride: int, longest: int, count: int
) -> Iterator[Window]:
    """Spread windows evenly over a stream, from its token ``longest`` on.

    Windows of any length up to the longest predict the same tokens, the last ``stride`` of each.
    """
    for number in range(count):
        end = longest + (total - longest) * number // max(1, count - 1)
        yield Window(end - length, end - stride, end)


def batch_windows(pieces: Iterator[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Put neighbours of equal shape together, up to ``max_tokens`` tokens, or else one by one."""
    for (read, _), alike in groupby(pieces, key=lambda window: window.shape):
        while batch := list(islice(alike, max(1, max_tokens // read))):
            yield batch
