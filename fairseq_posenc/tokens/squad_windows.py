"""Cuts questions with their contexts into overlapping windows, and writes them as a data-bin.

As in BERT, the model reads a paragraph (the context) that is longer than its input in windows, each
with the question, whose end may be cut. The target of a window is the first and last token of the
answer; where the answer is not in the window, or does not exist, it is ``<s>`` twice.
"""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.squad.databin import SPECIAL_SYMBOLS, Limits
from fairseq_posenc.tokens.squad_file import Answer, Question, Squad
from fairseq_posenc.tokens.subwords import Tokenizer
from fairseq_posenc.tokens.tokenizer import (
    Encoded,
    TextTokens,
    token_dtype,
    warn_of_unknown,
    write_items,
)

NO_ANSWER = (0, 0)  # positions of <s>


class SquadWindow(NamedTuple):
    """An input: ``<s> question </s></s> part of the context </s>``."""

    tokens: np.ndarray  # token ids of the window, `[T]`
    offset: int  # index in `tokens` at which the context begins
    context_start: int  # index in the whole context of the token at `offset`
    # `[S]`, for each of its S tokens of context: whether this window has the most around the token
    has_max_context: np.ndarray
    is_question_cut: bool

    def target(self, first: int, last: int) -> tuple[int, int]:
        """Locate two tokens, by index in the context, in the window; ``NO_ANSWER`` if outside."""
        if first < self.context_start or last >= self.context_start + len(self.has_max_context):
            return NO_ANSWER
        return first - self.context_start + self.offset, last - self.context_start + self.offset


def make_windows(
    question: np.ndarray, context: np.ndarray, limits: Limits, dictionary: Dictionary
) -> list[SquadWindow]:
    """Make the windows of a question, at least one.

    Args:
        question: token ids, ``[Q]``; those after ``limits.max_question`` are cut.
        context: token ids, ``[C]``.
        limits: sizes; they leave room for context, at least as much as the stride.
        dictionary: fairseq dictionary.
    """
    bos, eos = [dictionary.bos()], [dictionary.eos()]
    head = np.concatenate([bos, question[: limits.max_question], eos, eos])
    room = limits.max_length - len(head) - len(eos)
    # Starts and ends of overlapping parts of the context; the last part reaches its end.
    starts = range(0, max(len(context) - room, 0) + limits.stride, limits.stride)
    parts = [(first, min(first + room, len(context))) for first in starts]
    best_parts = _find_best_parts(len(context), parts)
    return [
        SquadWindow(
            tokens=np.concatenate([head, context[first:end], eos]).astype(np.int64),
            offset=len(head),
            context_start=first,
            has_max_context=best_parts[first:end] == number,
            is_question_cut=len(question) > limits.max_question,
        )
        for number, (first, end) in enumerate(parts)
    ]


def _find_best_parts(length: int, parts: list[tuple[int, int]]) -> np.ndarray:
    """Find the part in which each token has the most context on its shorter side: ``[C]``.

    As in BERT, a longer part gets a small bonus, and the first part wins a tie.
    """
    scores = np.full((len(parts), length), -1.0)  # below the score of any token in a part
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
        self._tokenizer, self.dictionary, self._limits = tokenizer, dictionary, limits
        self.tokenize_context = lru_cache(maxsize=1)(tokenizer.tokens)  # keeps the last paragraph

    def windows(self, question: Question) -> list[SquadWindow]:
        """Make the windows of a question."""
        tokens = self._tokenizer.tokens(question.text.strip()).ids
        context = self.tokenize_context(question.context).ids
        return make_windows(tokens, context, self._limits, self.dictionary)


def locate_answer(context: str, answer: Answer) -> int | None:
    """Find where a context has an answer's text, nearest to its ``start``; None if nowhere."""
    if answer.start >= 0 and context.startswith(answer.text, answer.start):
        return answer.start  # almost always, and much faster than the search
    starts = [i for i in range(len(context)) if context.startswith(answer.text, i)]
    return min(starts, key=lambda start: abs(start - answer.start), default=None)


def write_split(squad: Squad, window_maker: WindowMaker, prefix: Path) -> dict[str, int]:
    """Write the windows of a file, each question with its first answer that the context contains.

    Args:
        squad: the file.
        window_maker: makes the windows.
        prefix: path without suffixes.

    Returns:
        The counts for the manifest.

    Raises:
        UserError: the file has no answers, or no paragraph contains its own.
    """
    if not squad.answered:
        raise UserError(f"{squad.path}: has no answers, so nothing can be learned; name another")
    sequences: list[np.ndarray] = []
    spans: list[tuple[int, int]] = []
    # Counts that may stay 0 are in the manifest too.
    counts = Counter(questions_left_out=0, answers_moved=0, answers_in_no_window=0)
    counts.update(questions_without_answer=0, questions_cut=0, questions=len(squad.questions))
    for question in squad.questions:
        windows = window_maker.windows(question)
        counts["questions_cut"] += windows[0].is_question_cut
        targets = [NO_ANSWER] * len(windows)
        if not question.answers:
            counts["questions_without_answer"] += 1
        elif found := _find_answer(question, window_maker.tokenize_context(question.context)):
            first, last, is_moved = found
            targets = [window.target(first, last) for window in windows]
            counts["answers_moved"] += is_moved
            counts["answers_in_no_window"] += all(target == NO_ANSWER for target in targets)
        else:
            counts["questions_left_out"] += 1
            continue
        spans += targets
        sequences += [x.tokens.astype(token_dtype(window_maker.dictionary)) for x in windows]
    if not spans:
        raise UserError(f"{squad.path}: no paragraph has its answers; correct the file")
    tokens = np.concatenate(sequences)
    write_items(prefix, Encoded(tokens, np.array(list(map(len, sequences)), np.int32)))
    np.save(f"{prefix}.spans.npy", np.array(spans, dtype=np.int32))
    counts["tokens"] = len(tokens)
    counts["unknown_tokens"] = int((tokens == window_maker.dictionary.unk()).sum())
    counts["windows"] = len(spans)
    counts["windows_with_answer"] = sum(span != NO_ANSWER for span in spans)
    text_tokens = counts["tokens"] - SPECIAL_SYMBOLS * counts["windows"]
    warn_of_unknown(prefix.name, counts["unknown_tokens"], text_tokens)
    return dict(counts)


def _find_answer(question: Question, context: TextTokens) -> tuple[int, int, bool] | None:
    """Find the first and last token of the first answer that the context contains, or None.

    The third value is whether the answer is elsewhere than the file says.
    """
    for answer in question.answers or ():
        start = locate_answer(question.context, answer) if answer.text.strip() else None
        if start is not None and (tokens := context.covering(start, start + len(answer.text))):
            return *tokens, start != answer.start
    return None
