"""Exact match and F1, equal to SQuAD's official evaluation scripts for 1.1 and 2.0.

Both compare normalised texts; they differ in the treatment of empty texts, of questions without a
prediction, and of the odds that a question has no answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.finetuning.squad.data import V1, Question, Squad

Figures = dict[str, float]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Scores(NamedTuple):
    """Scores of questions, by id."""

    exact: dict[str, float]  # 0 or 1
    f1: dict[str, float]  # question -> F1 from 0 to 1


def normalise(text: str) -> str:
    """Normalise a text: lower case, without ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact(gold: str, predicted: str) -> float:
    """Compute the exact match: 1 if two texts are the same after normalisation, else 0."""
    return float(normalise(gold) == normalise(predicted))


def f1(gold: str, predicted: str, empty_agrees: bool) -> float:
    """Compute the F1 of the words of two texts.

    An ``int`` where the script for 2.0 has one: from Python 3.12 on, ``sum`` adds floats in another
    way than these, which shows in the last digit.

    Args:
        gold: right answer.
        predicted: predicted answer.
        empty_agrees: whether two texts without words get 1 (SQuAD 2.0) or 0 (1.1).
    """
    right, given = normalise(gold).split(), normalise(predicted).split()
    if not right or not given:
        return int(empty_agrees and right == given)
    same = sum((Counter(right) & Counter(given)).values())
    if not same:
        return 0
    precision, recall = same / len(given), same / len(right)
    return 2 * precision * recall / (precision + recall)


def evaluate(
    squad: Squad,
    predictions: Mapping[str, str],
    odds: Optional[Mapping[str, float]] = None,
    threshold: float = 1.0,
) -> Figures:
    """Compute the official figures, in percent, by their official names.

    Args:
        squad: questions with answers; the version selects the script.
        predictions: answers by id. In 1.1 a question without one scores 0.
        odds: SQuAD 2.0: odds of no answer by id, for the best thresholds.
        threshold: SQuAD 2.0: odds above it replace a prediction by no answer.

    Raises:
        UserError: the file has no answers, or in SQuAD 2.0 a prediction is missing.
    """
    if not squad.answered:
        raise UserError(f"{squad.path}: has no answers, so nothing can be scored")
    if squad.version == V1:
        if odds is not None:
            raise UserError(f"{squad.path}: in SQuAD 1.1 every question has an answer; no odds")
        return _evaluate_v1(squad, predictions)
    return _evaluate_v2(squad, predictions, odds, threshold)


def unanswered(squad: Squad, predictions: Mapping[str, str]) -> list[str]:
    """List the ids of questions without a prediction."""
    return [question.id for question in squad.questions if question.id not in predictions]


def _evaluate_v1(squad: Squad, predictions: Mapping[str, str]) -> Figures:
    squad.refuse_missing_answers()
    answered = [question for question in squad.questions if question.id in predictions]
    scores = _compute_scores(answered, predictions, empty_agrees=False)
    total = len(squad.questions)
    return {
        "exact_match": 100.0 * _sum_sequentially(scores.exact.values()) / total,
        "f1": 100.0 * _sum_sequentially(scores.f1.values()) / total,
    }


def _sum_sequentially(scores: Iterable[float]) -> float:
    """Sum as the script for 1.1 does: one score after the other.

    From Python 3.12 on, ``sum`` compensates rounding errors. The script for 2.0 calls ``sum``, so
    that its figures, and ours, differ between Pythons.
    """
    return reduce(add, scores, 0.0)


def _evaluate_v2(
    squad: Squad,
    predictions: Mapping[str, str],
    odds: Optional[Mapping[str, float]],
    threshold: float,
) -> Figures:
    _refuse_missing(squad, predictions, "predictions")
    if odds is not None:
        _refuse_missing(squad, odds, "odds of no answer")
    has_answer = {question.id: bool(question.answers) for question in squad.questions}
    raw = _compute_scores(squad.questions, predictions, empty_agrees=True)
    # Without odds the official script takes 0 for each.
    above = {name: (odds[name] if odds else 0.0) > threshold for name in has_answer}
    final = Scores(*({k: float(not has_answer[k]) if above[k] else s[k] for k in s} for s in raw))
    figures = _average_scores(final, has_answer)
    for prefix, wanted in (("HasAns", True), ("NoAns", False)):
        if part := [name for name, has in has_answer.items() if has == wanted]:
            means = _average_scores(final, part)
            figures.update({f"{prefix}_{name}": value for name, value in means.items()})
    if odds is not None:
        for kind, scores in zip(Scores._fields, raw):
            best, where = _find_best_threshold(predictions, scores, odds, has_answer)
            figures.update({f"best_{kind}": best, f"best_{kind}_thresh": where})
    return figures


def _compute_scores(
    questions: Iterable[Question], predictions: Mapping[str, str], empty_agrees: bool
) -> Scores:
    scores = Scores({}, {})
    for question in questions:
        texts = [answer.text for answer in question.answers or ()]
        if empty_agrees:  # in 2.0, answers without words do not count, and none at all is ""
            texts = [text for text in texts if normalise(text)] or [""]
        given = predictions[question.id]
        scores.exact[question.id] = max(exact(text, given) for text in texts)
        scores.f1[question.id] = max(f1(text, given, empty_agrees) for text in texts)
    return scores


def _average_scores(scores: Scores, names: Iterable[str]) -> Figures:
    names = list(names)
    means = [100.0 * sum(score[name] for name in names) / len(names) for score in scores]
    return {**dict(zip(Scores._fields, means)), "total": len(names)}


def _find_best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """Find the threshold on the odds with the best mean score; return the score, in percent, first.

    No question has its answer at first; then they get them, those with the lowest odds first.
    """
    score = best = float(sum(not has for has in has_answer.values()))
    threshold = 0.0
    for name in sorted(odds, key=lambda name: odds[name]):
        if name not in scores:
            continue
        score += scores[name] if has_answer[name] else -bool(predictions[name])
        if score > best:
            best, threshold = score, odds[name]
    return 100.0 * best / len(scores), threshold


def _refuse_missing(squad: Squad, values: Mapping[str, object], what: str) -> None:
    if missing := [question.id for question in squad.questions if question.id not in values]:
        raise UserError(
            f"{what}: {len(missing):,} of {len(squad.questions):,} questions are missing, first "
            f"of all {missing[0]}; SQuAD 2.0 can be scored only if each has one"
        )
