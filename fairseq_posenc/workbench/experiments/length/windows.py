"""Holds a text as one sequence of tokens, and cuts it into the windows that models read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor


class Stream(NamedTuple):
    """The inputs and targets of a text."""

    # The token before each target, `(N,)`. The first one is the symbol with which texts begin in
    # training (in fairseq, the end of a sentence), so the first token is predicted like any other.
    inputs: Tensor
    targets: Tensor  # `(N,)`, every token of the text, ends of sentences included

    @classmethod
    def from_tokens(cls, tokens: Tensor, start: int) -> Stream:
        """Build the stream of ``tokens``, ``(N,)``, that follow the token ``start``."""
        return cls(torch.cat([tokens.new_tensor([start]), tokens[:-1]]), tokens)

    @property
    def size(self) -> int:
        """Number of tokens, N."""
        return len(self.targets)


class Piece(NamedTuple):
    """A piece of a stream: the model reads ``start:end``, and ``scored:end`` are predicted."""

    start: int
    scored: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of tokens that are read, and that are predicted."""
        return self.end - self.start, self.end - self.scored


def cut_windows(total: int, length: int, stride: int) -> Iterator[Piece]:
    """Cut a stream so that every token is predicted exactly once.

    A window reads at most ``length`` tokens and predicts the last ``stride`` of them, so each has
    at least ``length - stride`` tokens of context, except at the beginning of the stream. If both
    are equal, windows do not overlap.

    Source:
        Press et al. (2022), "ALiBi", arXiv:2108.12409, appendix B; the windows are those of
        ``fairseq-eval-lm --context-window (length - stride)``.
    """
    for scored in range(0, total, stride):
        yield Piece(max(0, scored - length + stride), scored, min(scored + stride, total))


def spread_windows(
    total: int, length: int, stride: int, longest: int, count: int
) -> Iterator[Piece]:
    """Spread ``count`` windows evenly over a stream, to compare lengths up to ``longest``.

    Windows of all lengths end at the same tokens, the first one at ``longest``, so they predict the
    same tokens: the last ``stride`` of each window. They predict no token twice if at least
    ``(count - 1) * stride`` tokens follow the first window.
    """
    for number in range(count):
        end = longest + (total - longest) * number // max(1, count - 1)  # 1 for a single window
        yield Piece(end - length, end - stride, end)


def batch_windows(windows: Iterable[Piece], max_tokens: int) -> Iterator[list[Piece]]:
    """Group neighbours of equal shape into batches of ``max_tokens``; a longer window is alone."""
    for (read, _), same_shape in groupby(windows, key=lambda window: window.shape):
        while batch := list(islice(same_shape, max(1, max_tokens // read))):
            yield batch
