"""Splits a question with a long context into overlapping windows of limited length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.tasks.squad.databin import SYMBOLS, Limits

NO_ANSWER = (0, 0)  # the <s>


class Window(NamedTuple):
    """An input: ``<s> question </s></s> part of the context </s>``.

    Attributes:
        tokens: tokens of the window, ``[T]``.
        offset: beginning of the context in ``tokens``.
        first: number of the token of the context at ``offset``.
        best: for each token of the context, ``[S]``, whether no other window has more context
            around it.
    """

    tokens: np.ndarray
    offset: int
    first: int
    best: np.ndarray

    def target(self, first: int, last: int) -> tuple[int, int]:
        """Locate two tokens of the context in the window; at ``<s>`` if it does not have both."""
        if first < self.first or last >= self.first + len(self.best):
            return NO_ANSWER
        return first - self.first + self.offset, last - self.first + self.offset


def make_windows(
    question: np.ndarray, context: np.ndarray, limits: Limits, dictionary: Dictionary
) -> list[Window]:
    """Make the windows of a question, at least one.

    Args:
        question: tokens, ``[Q]``, of which ``limits.max_question`` are used.
        context: tokens, ``[S]``.
        limits: sizes of the windows.
        dictionary: fairseq dictionary.
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
    """Compute starts and ends of overlapping parts, the last of which reaches the end."""
    firsts = range(0, max(length - room, 0) + stride, stride)
    parts = [(first, min(first + room, length)) for first in firsts]
    return parts[: 1 + next(i for i, (_, end) in enumerate(parts) if end == length)]


def _best_parts(length: int, parts: list[tuple[int, int]]) -> np.ndarray:
    """Find the part with the most context around each token, ``[S]``; the shorter side decides.

    As in BERT, a longer part gets a small bonus, and the first part wins a tie.
    """
    scores = np.full((len(parts), length), -1.0)
    for number, (first, end) in enumerate(parts):
        before = np.arange(end - first)
        scores[number, first:end] = np.minimum(before, before[::-1]) + 0.01 * (end - first)
    return scores.argmax(axis=0)
