"""Cuts questions with their contexts into overlapping windows, and writes them as a data-bin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import data_file_path, index_file_path, make_builder

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.squad.databin import SYMBOLS, Limits
from fairseq_posenc.workbench.finetuning.squad.data import Answer, Question, Squad
from fairseq_posenc.workbench.tokens.symbols import warn_of_unknown
from fairseq_posenc.workbench.tokens.tokenizer import Tokenizer, Tokens

NO_ANSWER = (0, 0)  # positions of <s>


class Window(NamedTuple):
    """An input: ``<s> question </s></s> part of the context </s>``."""

    tokens: np.ndarray  # tokens of the window, `[T]`
    offset: int  # index in `tokens` at which the context begins
    first: int  # index in the whole context of the token at `offset`
    # whether this window has the most context around a token of its context, `[S]`
    best: np.ndarray

    def target(self, first: int, last: int) -> tuple[int, int]:
        """Locate two tokens of the context in the window; ``NO_ANSWER`` if one is outside."""
        if first < self.first or last >= self.first + len(self.best):
            return NO_ANSWER
        return first - self.first + self.offset, last - self.first + self.offset


def make_windows(
    question: np.ndarray, context: np.ndarray, limits: Limits, dictionary: Dictionary
) -> list[Window]:
    """Make the windows of a question, at least one.

    Args:
        question: tokens, ``[Q]``; those after ``limits.max_question`` are cut.
        context: tokens, ``[S]``.
        limits: sizes of the windows.
        dictionary: fairseq dictionary.
    """
    question = question[: limits.max_question]
    bos, eos = [dictionary.bos()], [dictionary.eos()]
    head = np.concatenate([bos, question, eos, eos])
    room = limits.max_length - len(question) - SYMBOLS
    parts = _split_context(len(context), room, limits.stride)
    best = _find_best_parts(len(context), parts)
    return [
        Window(
            np.concatenate([head, context[first:end], eos]).astype(np.int64),
            len(head),
            first,
            best[first:end] == number,
        )
        for number, (first, end) in enumerate(parts)
    ]


def _split_context(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Compute the starts and ends of overlapping parts; the last one reaches the end."""
    firsts = range(0, max(length - room, 0) + stride, stride)
    parts = [(first, min(first + room, length)) for first in firsts]
    return parts[: 1 + next(i for i, (_, end) in enumerate(parts) if end == length)]


def _find_best_parts(length: int, parts: list[tuple[int, int]]) -> np.ndarray:
    """Find the part with the most context around each token, on its shorter side: ``[S]``.

    As in BERT, a longer part gets a small bonus, and the first part wins a tie.
    """
    scores = np.full((len(parts), length), -1.0)
    for number, (first, end) in enumerate(parts):
        before = np.arange(end - first)
        scores[number, first:end] = np.minimum(before, before[::-1]) + 0.01 * (end - first)
    return scores.argmax(axis=0)


class WindowMaker:
    """Makes windows, and tokenizes a paragraph once for all consecutive questions about it.

    Args:
        tokenizer: tokenizer with offsets.
        dictionary: fairseq dictionary.
        limits: sizes of the windows.
    """

    def __init__(self, tokenizer: Tokenizer, dictionary: Dictionary, limits: Limits) -> None:
        self._tokenizer, self._dictionary, self._limits = tokenizer, dictionary, limits
        self._last: tuple[str, Optional[Tokens]] = ("", None)
        self.unk = dictionary.unk()
        self.questions_cut = 0

    def context(self, text: str) -> Tokens:
        """Tokenize a paragraph."""
        previous, tokens = self._last
        if tokens is None or previous != text:
            tokens = self._tokenizer.tokens(text)
            self._last = text, tokens
        return tokens

    def windows(self, question: Question) -> list[Window]:
        """Make the windows of a question."""
        tokens = self._tokenizer.tokens(question.text.strip()).ids
        self.questions_cut += len(tokens) > self._limits.max_question
        context = self.context(question.context).ids
        return make_windows(tokens, context, self._limits, self._dictionary)


def locate_answer(context: str, answer: Answer) -> Optional[int]:
    """Find an answer in its context: where it should start, or nearest to that; None without it."""
    if context.startswith(answer.text, answer.start) and answer.start >= 0:
        return answer.start
    starts = [i for i in range(len(context)) if context.startswith(answer.text, i)]
    return min(starts, key=lambda start: abs(start - answer.start), default=None)


def write_split(squad: Squad, encoder: WindowMaker, symbols: int, prefix: Path) -> dict[str, Any]:
    """Write the windows of a file, with the first answer of each question that its context has.

    Args:
        squad: the file.
        encoder: makes the windows.
        symbols: size of the dictionary.
        prefix: path without suffixes.

    Returns:
        The counts for the manifest.

    Raises:
        UserError: the file has no answers.
    """
    if not squad.answered:
        raise UserError(f"{squad.path}: has no answers, so nothing can be learnt from it")
    builder = make_builder(data_file_path(str(prefix)), "mmap", vocab_size=symbols)
    spans: list[tuple[int, int]] = []
    counts: Counter[str] = Counter(questions=len(squad.questions))
    cut_before = encoder.questions_cut
    for question in squad.questions:
        windows = encoder.windows(question)
        targets = _locate_answer_in_windows(
            question, windows, encoder.context(question.context), counts
        )
        spans += targets
        for window in windows[: len(targets)]:
            builder.add_item(torch.from_numpy(window.tokens))
            counts["tokens"] += len(window.tokens)
            counts["unknown_tokens"] += int((window.tokens == encoder.unk).sum())
    builder.finalize(index_file_path(str(prefix)))
    np.save(f"{prefix}.spans.npy", np.array(spans, dtype=np.int32).reshape(-1, 2))
    counts["windows"] = len(spans)
    counts["windows_with_answer"] = sum(span != NO_ANSWER for span in spans)
    words = counts["tokens"] - SYMBOLS * counts["windows"]
    warn_of_unknown(prefix.name, counts["unknown_tokens"], words)
    counts["questions_cut"] = encoder.questions_cut - cut_before
    names = "questions_left_out answers_moved answers_in_no_window questions_without_answer"
    return {**dict.fromkeys(names.split(), 0), **counts}


def _locate_answer_in_windows(
    question: Question, windows: list[Window], tokens: Tokens, counts: Counter[str]
) -> list[tuple[int, int]]:
    """Locate the answer in each window; an empty list if the context does not contain it."""
    if not question.answers:
        counts["questions_without_answer"] += 1
        return [NO_ANSWER] * len(windows)
    for answer in filter(lambda answer: answer.text.strip(), question.answers):
        start = locate_answer(question.context, answer)
        covering = None if start is None else tokens.covering(start, start + len(answer.text))
        if covering is not None:
            targets = [window.target(*covering) for window in windows]
            counts["answers_moved"] += start != answer.start
            counts["answers_in_no_window"] += all(target == NO_ANSWER for target in targets)
            return targets
    counts["questions_left_out"] += 1
    return []
