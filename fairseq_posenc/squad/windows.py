"""A question and a long context as inputs of limited length that overlap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.tasks.squad.databin import SYMBOLS, Limits

NO_ANSWER = (0, 0)  # the <s>, which a window without the answer points at


class Window(NamedTuple):
    """An input: ``<s> question </s></s> part of the context </s>``.

    Attributes:
        tokens: ``[T]``.
        offset: where the context begins in ``tokens``.
        first: the context's token that is there.
        best: ``[S]``, for each token of the context in it, whether no other window shows more of
            what is around that token.
    """

    tokens: np.ndarray
    offset: int
    first: int
    best: np.ndarray

    def target(self, first: int, last: int) -> tuple[int, int]:
        """Return where two tokens of the context are; the ``<s>`` if not both are here."""
        if first < self.first or last >= self.first + len(self.best):
            return NO_ANSWER
        return first - self.first + self.offset, last - self.first + self.offset


def make_windows(
    question: np.ndarray, context: np.ndarray, limits: Limits, dictionary: Dictionary
) -> list[Window]:
    """Return the windows of a question, at least one.

    Args:
        question: its tokens, ``[Q]``, cut to ``limits.max_question``.
        context: its tokens, ``[S]``.
        limits: sizes.
        dictionary: fairseq's.
    """
    question = question[: limits.max_question]
    bos, eos = [dictionary.bos()], [dictionary.eos()]
    head = np.concatenate([bos, question, eos, eos])
    room = limits.max_length - len(question) - SYMBOLS
    parts = _parts(len(context), room, limits.stride)
    best = _best_parts(len(context), parts)
    return [
        Window(
            np.concatenate([head, context[first:end], eos]).astype(np.int64),
            len(head),
            first,
            best[first:end] == number,
        )
        for number, (first, end) in enumerate(parts)
    ]


def _parts(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return beginnings and ends of overlapping parts, the last of which reaches the end."""
    firsts = range(0, max(length - room, 0) + stride, stride)
    parts = [(first, min(first + room, length)) for first in firsts]
    return parts[: 1 + next(i for i, (_, end) in enumerate(parts) if end == length)]


def _best_parts(length: int, parts: list[tuple[int, int]]) -> np.ndarray:
    """Return which part shows most of the context around each token, the shorter side deciding.

    A little goes to the longer part, and a tie to the first, as in BERT.
    """
    scores = np.full((len(parts), length), -1.0)
    for number, (first, end) in enumerate(parts):
        before = np.arange(end - first)
        scores[number, first:end] = np.minimum(before, before[::-1]) + 0.01 * (end - first)
    return scores.argmax(axis=0)
