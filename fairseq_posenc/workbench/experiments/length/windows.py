"""Which tokens a model reads to predict which: blocks, or a window that slides."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import NamedTuple


class Window(NamedTuple):
    """A piece of the stream: read from ``start``, predicted from ``scored``, up to ``end``."""

    start: int
    scored: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many tokens are read, and how many of them are predicted."""
        return self.end - self.start, self.end - self.scored


def windows(total: int, length: int, stride: int) -> Iterator[Window]:
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


def batches(pieces: Iterator[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Put neighbours of equal shape together, up to ``max_tokens`` tokens, or else one by one."""
    for (read, _), alike in groupby(pieces, key=lambda window: window.shape):
        while batch := list(islice(alike, max(1, max_tokens // read))):
            yield batch
