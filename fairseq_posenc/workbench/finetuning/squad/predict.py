"""Predicts answers with a fine-tuned model: the best spans of all windows, or no answer.

As in BERT, the model scores each token as the first and as the last one of the answer. The score
of a span is the sum of both; the score of no answer (``null_score``) is the sum for ``<s>``.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import data_utils

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.tokens.squad_file import Question
from fairseq_posenc.tokens.squad_windows import SquadWindow, WindowMaker
from fairseq_posenc.tokens.tokenizer import TextTokens
from fairseq_posenc.workbench.loading.checkpoints import load_state
from fairseq_posenc.workbench.loading.open_model import load_tokenizer, open_model
from fairseq_posenc.workbench.running.devices import place
from fairseq_posenc.workbench.running.progress import bar, say

NBEST = 20  # spans kept of a window: the best may be white space, which answers nothing
MAX_ANSWER = 30  # tokens


class Prediction(NamedTuple):
    """The prediction for a question."""

    id: str  # id of the question
    answer: str  # the best text of the context; empty if it has none
    null_odds: float  # score of no answer minus that of the answer; 0 without an answer


class Span(NamedTuple):
    """A possible answer, as a range of tokens in the whole context."""

    first: int  # index of its first token
    last: int  # index of its last token
    score: float


class WindowSpans(NamedTuple):
    """The best spans of one window."""

    spans: list[Span]  # best first
    null_score: float  # of no answer


def find_best_spans(window: SquadWindow, start: np.ndarray, end: np.ndarray) -> WindowSpans:
    """Find the best spans of a window inside the context, of at most ``MAX_ANSWER`` tokens.

    A span counts only in the window with the most context around its first token.

    Args:
        window: the window.
        start: score of each token as the first one, ``[T]``.
        end: score of each token as the last one, ``[T]``.
    """
    is_finite = np.isfinite([start, end])[:, : len(window.tokens)].all()  # else it is refused
    null_score = float(start[0] + end[0]) if is_finite else np.nan  # token 0 is <s>
    is_best = window.has_max_context  # [S] of bool, for the window's tokens of the context
    if not len(is_best):
        return WindowSpans([], null_score)
    part = slice(window.offset, window.offset + len(is_best))  # their place in the window
    # Row i of `ends` has the scores of tokens i to i + MAX_ANSWER - 1 as the last one.
    padded = np.concatenate([end[part], np.full(MAX_ANSWER - 1, -np.inf, dtype=end.dtype)])
    ends = np.lib.stride_tricks.sliding_window_view(padded, MAX_ANSWER)  # [S, MAX_ANSWER]
    sums = np.where(is_best, start[part], -np.inf)[:, None] + ends  # [S, MAX_ANSWER]
    spans = []
    for index in np.argsort(-sums, axis=None, kind="stable")[:NBEST].tolist():
        row, further = divmod(index, MAX_ANSWER)  # `further` tokens follow the first one
        if np.isfinite(score := float(sums[row, further])):  # -inf: another window's, or outside
            first = window.context_start + row  # index in the whole context
            spans.append(Span(first, first + further, score))
    return WindowSpans(spans, null_score)


def combine_windows(
    question_id: str, context: str, tokens: TextTokens, windows: Sequence[WindowSpans]
) -> Prediction:
    """Choose the best span, in any window of a question, whose text is not empty."""
    # As in BERT, the smallest score of no answer counts. Every question has a window.
    null_score = np.min([window.null_score for window in windows])  # NaN if one is
    if not np.isfinite(null_score):
        raise UserError(f"question {question_id}: the model's scores are NaN or infinite")
    for span in sorted(chain(*(window.spans for window in windows)), key=lambda span: -span.score):
        if text := context[tokens.starts[span.first] : tokens.ends[span.last]].strip():
            return Prediction(question_id, text, null_score - span.score)
    return Prediction(question_id, "", 0.0)


class Predictor(NamedTuple):
    """Answers questions with a model."""

    model: Any  # RoBERTa with a span head, in evaluation mode, on its device
    window_maker: WindowMaker
    spec: str  # spec of its position encodings

    @classmethod
    def load(cls, path: Path, data: Path | None, dtype: torch.dtype) -> "Predictor":
        """Load a model that ``fairseq-posenc squad train`` made.

        Args:
            path: checkpoint of the model.
            data: folder that it was trained on; None for the one in the checkpoint.
            dtype: precision; the scores of the head are always float32.

        Raises:
            UserError: the model was not fine-tuned on SQuAD, or a file is missing.
        """
        state = load_state(path, "--checkpoint")
        has_head = any(name.startswith("span_head.") for name in state["model"])
        if state["cfg"].task._name != "squad" or not has_head:
            raise UserError(f"--checkpoint {path}: was not fine-tuned on SQuAD; use squad train")
        opened = open_model(path, data, state=state)
        tokenizer = load_tokenizer(opened.data, opened.task.dictionary)
        window_maker = WindowMaker(tokenizer, opened.task.dictionary, opened.task.data_bin.limits)
        return cls(place(opened.model, dtype), window_maker, str(opened.positions["encoder"]))

    def predict(self, questions: Sequence[Question], max_tokens: int) -> list[Prediction]:
        """Answer questions; return the predictions in their order.

        Args:
            questions: the questions; faster if those about the same paragraph are neighbors.
            max_tokens: number of tokens in a batch, with padding; a longer window is one alone.
        """
        inputs = [
            (number, window)
            for number, question in enumerate(questions)
            for window in self.window_maker.windows(question)
        ]
        if cut := len({number for number, window in inputs if window.is_question_cut}):
            say(f"{counted(cut, 'questions')} longer than the limit, cut")
        spans_of_questions: list[list[WindowSpans]] = [[] for _ in questions]
        lengths = np.array([len(window.tokens) for _, window in inputs])
        order = np.argsort(-lengths, kind="stable")  # longest first: memory runs out early or never
        at_most = int(lengths.max(initial=max_tokens))  # fairseq refuses a window above it
        with bar(desc="squad predict", total=len(inputs), unit=" windows") as progress:
            for batch in data_utils.batch_by_size(order, lengths.__getitem__, max_tokens=at_most):
                numbers, windows = zip(*(inputs[index] for index in batch))
                for number, spans_of_window in zip(numbers, self._score(windows)):
                    spans_of_questions[number].append(spans_of_window)
                progress.update(len(batch))
        return [
            combine_windows(x.id, x.context, self.window_maker.tokenize_context(x.context), spans)
            for x, spans in zip(questions, spans_of_questions)
        ]

    @torch.inference_mode()
    def _score(self, windows: Sequence[SquadWindow]) -> list[WindowSpans]:
        """Score a batch of windows; return the best spans of each."""
        pad = self.window_maker.dictionary.pad()
        tokens = data_utils.collate_tokens([torch.from_numpy(x.tokens) for x in windows], pad)
        device = next(self.model.parameters()).device
        scores = self.model(tokens.to(device), span_scores=True)  # starts and ends, [windows, T]
        return list(map(find_best_spans, windows, *(x.cpu().numpy() for x in scores)))
