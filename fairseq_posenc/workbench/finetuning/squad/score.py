"""Computes exact match and F1 exactly as SQuAD's official evaluation scripts for 1.1 and 2.0 do.

Both scripts compare normalized texts; they treat empty texts, questions without a prediction, and
the odds that a question has no answer differently.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.squad_file import V1, Question, Squad

Figures = dict[str, float]
Scores = dict[str, dict[str, float]]  # `exact` and `f1` -> id of a question -> its score, 0 to 1
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Normalize a text: lower case, without ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact(gold: str, predicted: str) -> float:
    """Compute the exact match: 1 if two texts are the same after normalization, else 0."""
    return float(normalize(gold) == normalize(predicted))


def f1(gold: str, predicted: str, empty_agrees: bool) -> float:
    """Compute the F1 of the words of two texts.

    Without common words the result is an ``int``, as in the script for 2.0: from Python 3.12 on,
    ``sum`` adds integers and floats differently, which shows in the last digit.

    Args:
        gold: an annotator's answer.
        predicted: predicted answer.
        empty_agrees: whether two texts without words score 1 (SQuAD 2.0) or 0 (1.1).
    """
    gold_words, words = normalize(gold).split(), normalize(predicted).split()
    if not gold_words or not words:
        return int(empty_agrees and gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    if not common:
        return 0
    precision, recall = common / len(words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def evaluate(
    squad: Squad,
    predictions: Mapping[str, str],
    odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> Figures:
    """Compute the official figures, in percent, by their official names.

    Args:
        squad: questions with answers; the version selects the script.
        predictions: answers by id; in 1.1 a question without one scores 0, in 2.0 all need one.
        odds: SQuAD 2.0: odds of no answer by id, of all questions, for the best thresholds.
        threshold: SQuAD 2.0: where the odds exceed it, the prediction becomes no answer.

    Raises:
        UserError: no answers in the file; odds for 1.1; missing predictions or odds for 2.0.
    """
    if not squad.answered:
        raise UserError(f"{squad.path}: has no answers, so nothing can be scored")
    if squad.version == V1:
        if odds is not None:
            raise UserError(f"{squad.path}: odds of no answer are for SQuAD 2.0, not 1.1")
        predicted = [question for question in squad.questions if question.id in predictions]
        scores = _compute_scores(predicted, predictions, empty_agrees=False)
        # The script adds one score after the other; from Python 3.12 on, `sum` compensates rounding
        # errors. The script for 2.0 calls `sum`: its figures and ours depend on Python's version.
        exact_matches, f1s = (reduce(add, scores[x].values(), 0.0) for x in ("exact", "f1"))
        count = len(squad.questions)
        return {"exact_match": 100.0 * exact_matches / count, "f1": 100.0 * f1s / count}
    return _evaluate_v2(squad, predictions, odds, threshold)


def list_missing(squad: Squad, values: Mapping[str, object]) -> list[str]:
    """List the ids of questions that have no value, such as a prediction."""
    return [question.id for question in squad.questions if question.id not in values]


def _evaluate_v2(
    squad: Squad, predictions: Mapping[str, str], odds: Mapping[str, float] | None, threshold: float
) -> Figures:
    """Compute the figures of SQuAD 2.0 (:func:`evaluate`)."""
    _refuse_missing(squad, predictions, "predictions")
    if odds is not None:
        _refuse_missing(squad, odds, "odds of no answer")
    has_answer = {question.id: bool(question.answers) for question in squad.questions}
    raw = _compute_scores(squad.questions, predictions, empty_agrees=True)
    final = {metric: dict(scores) for metric, scores in raw.items()}  # copies, changed below
    for question_id, is_answerable in has_answer.items():
        # Without odds, the official script assumes 0 for every question.
        if (0.0 if odds is None else odds[question_id]) > threshold:
            for scores in final.values():
                scores[question_id] = float(not is_answerable)
    figures: Figures = {}
    for prefix, included in {"": (True, False), "HasAns_": (True,), "NoAns_": (False,)}.items():
        if ids := [key for key, is_answerable in has_answer.items() if is_answerable in included]:
            for metric, scores in final.items():
                figures[prefix + metric] = 100.0 * sum(scores[key] for key in ids) / len(ids)
            figures[f"{prefix}total"] = len(ids)
    if odds is not None:
        for metric, scores in raw.items():
            best, best_threshold = _find_best_threshold(predictions, scores, odds, has_answer)
            figures.update({f"best_{metric}": best, f"best_{metric}_thresh": best_threshold})
    return figures


def _compute_scores(
    questions: Iterable[Question], predictions: Mapping[str, str], empty_agrees: bool
) -> Scores:
    """Compute both scores of each question: the highest over the annotators' answers."""
    scores: Scores = {"exact": {}, "f1": {}}
    for question in questions:
        texts = [answer.text for answer in question.answers or ()]
        if empty_agrees:  # in 2.0, answers without words do not count, and no answer is ""
            texts = [text for text in texts if normalize(text)] or [""]
        predicted = predictions[question.id]  # `texts` has at least one: in 1.1, all have answers
        scores["exact"][question.id] = max(exact(text, predicted) for text in texts)
        scores["f1"][question.id] = max(f1(text, predicted, empty_agrees) for text in texts)
    return scores


def _find_best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """Find the best mean score, in percent, over all thresholds on the odds; return both.

    The threshold rises from below all odds, where every prediction becomes no answer, and passes
    them in order: from then on, the prediction of a question that it passes counts as it is.
    """
    # At first, questions that have no answer score 1, and all others 0.
    total = float(sum(not is_answerable for is_answerable in has_answer.values()))
    best, threshold = total, 0.0  # 0, as in the official script, if no threshold is better
    for question_id in sorted(odds, key=odds.__getitem__):
        if question_id not in scores:  # the file of odds may have more questions
            continue
        if has_answer[question_id]:
            total += scores[question_id]
        elif predictions[question_id]:  # a text, wrong where no answer is right
            total -= 1
        if total > best:
            best, threshold = total, odds[question_id]
    return 100.0 * best / len(scores), threshold


def _refuse_missing(squad: Squad, values: Mapping[str, object], name: str) -> None:
    if missing := list_missing(squad, values):
        count = f"{len(missing):,} of {len(squad.questions):,} questions are missing"
        raise UserError(f"{name}: {count}, the first is {missing[0]}; SQuAD 2.0 needs all of them")
