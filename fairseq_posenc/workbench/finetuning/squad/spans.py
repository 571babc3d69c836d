"""Turns scores of tokens into answers: the best spans of all windows, and the odds of no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fairseq_posenc.workbench.finetuning.squad.windows import Window
from fairseq_posenc.workbench.tokens.offsets import Tokens

NBEST = 20
LONGEST = 30  # tokens of an answer


class Candidate(NamedTuple):
    """A possible answer.

    Attributes:
        text: text of the context; empty for no answer.
        score: sum of the scores of its first and its last token.
        probability: share among the candidates of the question.
        start: first character in the context.
        end: the character after its last.
    """

    text: str
    score: float
    probability: float = 0.0
    start: int = 0
    end: int = 0


class Prediction(NamedTuple):
    """The prediction for a question.

    Attributes:
        id: id of the question.
        candidates: texts of the context, the best first; empty if the context is.
        null: score of no answer.
    """

    id: str
    candidates: list[Candidate]
    null: float

    @property
    def answer(self) -> str:
        """The best text of the context."""
        return self.candidates[0].text if self.candidates else ""

    @property
    def null_odds(self) -> float:
        """The score of no answer minus that of the best text."""
        return self.null - self.candidates[0].score if self.candidates else 0.0

    def final(self, threshold: float) -> str:
        """Choose the answer of SQuAD 2.0: empty if the odds of no answer exceed a threshold."""
        return "" if self.null_odds > threshold else self.answer

    def ranked(self, with_null: bool) -> list[Candidate]:
        """Rank the candidates, optionally with no answer as one of them, with probabilities."""
        candidates = [*self.candidates, *([Candidate("", self.null)] if with_null else [])]
        if not candidates:
            return []
        candidates.sort(key=lambda candidate: -candidate.score)
        weights = np.exp(np.array([c.score for c in candidates]) - candidates[0].score)
        shares = (weights / weights.sum()).tolist()
        return [c._replace(probability=share) for c, share in zip(candidates, shares)]


class Scored(NamedTuple):
    """The best spans of one window.

    Attributes:
        spans: first and last token of the context, and score.
        null: score of no answer.
    """

    spans: list[tuple[int, int, float]]
    null: float


def best_spans(window: Window, start: np.ndarray, end: np.ndarray) -> Scored:
    """Find the best spans of a window: within the context, and with the start before the end.

    A span counts in the window that has the most context around its first token.

    Args:
        window: the window.
        start: scores of each token as the first one, ``[T]``.
        end: scores of each token as the last one, ``[T]``.
    """
    size = len(window.best)
    null = float(start[0] + end[0])
    if not size:
        return Scored([], null)
    part = slice(window.offset, window.offset + size)
    padded = np.concatenate([end[part], np.full(LONGEST - 1, -np.inf, dtype=end.dtype)])
    lasts = np.lib.stride_tricks.sliding_window_view(padded, LONGEST)  # [S, LONGEST]
    sums = np.where(window.best, start[part], -np.inf)[:, None] + lasts
    order = np.argsort(-sums, axis=None, kind="stable")[:NBEST]
    found = [(int(index) // LONGEST, int(index) % LONGEST) for index in order]
    return Scored(
        [
            (window.first + first, window.first + first + more, float(sums[first, more]))
            for first, more in found
            if np.isfinite(sums[first, more])
        ],
        null,
    )


def combine_windows(
    name: str, context: str, tokens: Tokens, scored: Sequence[Scored]
) -> Prediction:
    """Combine the spans of all windows of a question.

    Args:
        name: id of the question.
        context: the paragraph.
        tokens: tokens of the paragraph.
        scored: spans of each window.
    """
    spans = sorted((span for each in scored for span in each.spans), key=lambda span: -span[2])
    texts: dict[str, Candidate] = {}
    for first, last, score in spans:
        piece = context[int(tokens.starts[first]) : int(tokens.ends[last])]
        text = piece.strip()
        if text and text not in texts:
            start = int(tokens.starts[first]) + len(piece) - len(piece.lstrip())
            texts[text] = Candidate(text, score, start=start, end=start + len(text))
    # The window with the lowest score of no answer decides.
    return Prediction(name, list(texts.values())[:NBEST], min(each.null for each in scored))
