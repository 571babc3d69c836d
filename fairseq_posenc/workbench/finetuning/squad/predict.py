"""Predicts answers with a fine-tuned model: the best spans of all windows, or no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.finetuning.squad.data import Question
from fairseq_posenc.workbench.finetuning.squad.windows import Window, WindowMaker
from fairseq_posenc.workbench.loading.checkpoints import load_state
from fairseq_posenc.workbench.loading.dictionaries import load_tokenizer
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import CPU, ComputeOptions
from fairseq_posenc.workbench.running.progress import bar
from fairseq_posenc.workbench.tokens.tokenizer import Tokens

NBEST = 20
MAX_ANSWER = 30  # tokens


class Candidate(NamedTuple):
    """A possible answer."""

    text: str  # text from the context; empty for no answer
    score: float  # sum of the scores of its first and its last token
    probability: float = 0.0  # probability among the candidates of the question
    start: int = 0  # first character in the context
    end: int = 0  # character after its last one


class Prediction(NamedTuple):
    """The prediction for a question."""

    id: str  # id of the question
    candidates: list[Candidate]  # best first; empty if the context is empty
    null: float  # score of no answer

    @property
    def answer(self) -> str:
        """Text of the best candidate."""
        return self.candidates[0].text if self.candidates else ""

    @property
    def null_odds(self) -> float:
        """Score of no answer minus that of the best candidate."""
        return self.null - self.candidates[0].score if self.candidates else 0.0

    def final(self, threshold: float) -> str:
        """Choose the answer of SQuAD 2.0: empty if the odds of no answer exceed a threshold."""
        return "" if self.null_odds > threshold else self.answer

    def ranked(self, with_null: bool) -> list[Candidate]:
        """Rank the candidates, with probabilities; no answer is among them if ``with_null``."""
        candidates = [*self.candidates, *([Candidate("", self.null)] if with_null else [])]
        if not candidates:
            return []
        candidates.sort(key=lambda candidate: -candidate.score)
        weights = np.exp(np.array([c.score for c in candidates]) - candidates[0].score)
        shares = (weights / weights.sum()).tolist()
        return [c._replace(probability=share) for c, share in zip(candidates, shares)]


class Span(NamedTuple):
    """A possible answer, as a range of tokens in the context."""

    first: int  # index of its first token
    last: int  # index of its last token
    score: float  # sum of the scores of both


class WindowSpans(NamedTuple):
    """The best spans of one window."""

    spans: list[Span]  # best first
    null: float  # score of no answer


def find_best_spans(window: Window, start: np.ndarray, end: np.ndarray) -> WindowSpans:
    """Find the best spans of a window that lie in the context and are not too long.

    A span counts only in the window with the most context around its first token.

    Args:
        window: the window.
        start: score of each token as the first one, ``[T]``.
        end: score of each token as the last one, ``[T]``.
    """
    size = len(window.best)
    null = float(start[0] + end[0])
    if not size:
        return WindowSpans([], null)
    part = slice(window.offset, window.offset + size)
    padded = np.concatenate([end[part], np.full(MAX_ANSWER - 1, -np.inf, dtype=end.dtype)])
    lasts = np.lib.stride_tricks.sliding_window_view(padded, MAX_ANSWER)  # [S, MAX_ANSWER]
    sums = np.where(window.best, start[part], -np.inf)[:, None] + lasts
    order = np.argsort(-sums, axis=None, kind="stable")[:NBEST]
    best = [(int(index) // MAX_ANSWER, int(index) % MAX_ANSWER) for index in order]
    spans = [
        Span(window.first + first, window.first + first + extra, float(sums[first, extra]))
        for first, extra in best
        if np.isfinite(sums[first, extra])
    ]
    return WindowSpans(spans, null)


def combine_windows(
    name: str, context: str, tokens: Tokens, windows: Sequence[WindowSpans]
) -> Prediction:
    """Combine the spans of all windows of a question.

    Args:
        name: id of the question.
        context: the paragraph.
        tokens: tokens of the paragraph.
        windows: best spans of each window.
    """
    spans = sorted(
        (span for window in windows for span in window.spans), key=lambda span: -span.score
    )
    texts: dict[str, Candidate] = {}
    for first, last, score in spans:
        piece = context[int(tokens.starts[first]) : int(tokens.ends[last])]
        text = piece.strip()
        if text and text not in texts:
            start = int(tokens.starts[first]) + len(piece) - len(piece.lstrip())
            texts[text] = Candidate(text, score, start=start, end=start + len(text))
    # The window that is least in favour of no answer decides about it.
    return Prediction(name, list(texts.values())[:NBEST], min(window.null for window in windows))


class Predictor:
    """Answers questions with a model.

    Args:
        model: fine-tuned model in evaluation mode, on its device.
        encoder: makes the windows.
        dictionary: fairseq dictionary.
        version: version of SQuAD that the model was fine-tuned on.
    """

    def __init__(
        self, model: Any, encoder: WindowMaker, dictionary: Dictionary, version: str
    ) -> None:
        self.model, self.encoder, self.dictionary = model, encoder, dictionary
        self.version = version

    @classmethod
    def load(
        cls, path: Path, data: Optional[Path] = None, compute: ComputeOptions = CPU
    ) -> Predictor:
        """Load a model that ``fairseq-posenc squad train`` made.

        Args:
            path: checkpoint of the model.
            data: folder that it was trained on; None for the one in the checkpoint.
            compute: device and precision; the scores of the head are always float32.

        Raises:
            UserError: the model was not fine-tuned on SQuAD, or a file is missing.
        """
        state = load_state(path, "--checkpoint")
        has_head = any(name.startswith("span_head.") for name in state["model"])
        if state["cfg"].task._name != "squad" or not has_head:
            raise UserError(
                f"--checkpoint {path}: was not fine-tuned on SQuAD; use fairseq-posenc squad train"
            )
        opened = open_model(path, data, state=state)
        dictionary, data_bin = opened.task.dictionary, opened.task.data_bin
        encoder = WindowMaker(load_tokenizer(opened.data, dictionary), dictionary, data_bin.limits)
        return cls(compute.place(opened.model), encoder, dictionary, data_bin.version)

    def predict(self, questions: Sequence[Question], max_tokens: int = 8192) -> list[Prediction]:
        """Answer questions.

        Args:
            questions: the questions; it is faster if those about a paragraph follow each other.
            max_tokens: maximum number of tokens in a batch, including padding.

        Returns:
            The predictions in the order of the questions.
        """
        inputs = [
            (number, window)
            for number, question in enumerate(questions)
            for window in self.encoder.windows(question)
        ]
        scored: list[list[WindowSpans]] = [[] for _ in questions]
        with bar("squad predict", len(inputs), " windows") as shown:
            for batch in _batch_windows(inputs, max_tokens):
                for (number, _), spans in zip(batch, self._score([window for _, window in batch])):
                    scored[number].append(spans)
                shown.update(len(batch))
        return [
            combine_windows(
                question.id, question.context, self.encoder.context(question.context), spans
            )
            for question, spans in zip(questions, scored)
        ]

    @torch.inference_mode()
    def _score(self, windows: Sequence[Window]) -> list[WindowSpans]:
        """Score a batch of windows; return the best spans of each."""
        tokens = data_utils.collate_tokens(
            [torch.from_numpy(window.tokens) for window in windows], self.dictionary.pad()
        )
        device = next(self.model.parameters()).device
        scores = self.model(tokens.to(device), span_scores=True)
        starts, ends = (score.cpu().numpy() for score in scores)
        return [find_best_spans(*scores) for scores in zip(windows, starts, ends)]


def _batch_windows(
    inputs: Sequence[tuple[int, Window]], max_tokens: int
) -> Iterator[list[tuple[int, Window]]]:
    """Batch windows of similar length, the longest first, so that memory runs out early if at all.

    Each window comes with the number of its question.
    """
    batch: list[tuple[int, Window]] = []
    for number, window in sorted(inputs, key=lambda item: -len(item[1].tokens)):
        if batch and (len(batch) + 1) * len(batch[0][1].tokens) > max_tokens:
            yield batch
            batch = []
        batch.append((number, window))
    if batch:
        yield batch
