"""Reads SQuAD's JSON files: articles, paragraphs, questions and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import read_bytes

V1, V2 = "1.1", "2.0"
_T = TypeVar("_T")


class Answer(NamedTuple):
    """An annotator's answer."""

    text: str
    start: int  # number of its first character in the context


class Question(NamedTuple):
    """A question about a paragraph."""

    id: str  # key of its prediction
    text: str  # the question
    context: str  # the paragraph
    # answers of the annotators, empty if it has none; None if the file has no answers
    answers: Optional[tuple[Answer, ...]]


class Squad(NamedTuple):
    """A SQuAD file."""

    path: Path  # path of the file
    version: str  # `1.1`, where every question has an answer, or `2.0`
    questions: list[Question]  # questions in the order of the file

    @property
    def answered(self) -> bool:
        """Whether the file has answers; published test sets have none."""
        return all(question.answers is not None for question in self.questions)

    def refuse_missing_answers(self) -> None:
        """Refuse questions without an answer if that has no meaning in the version of the file.

        Raises:
            UserError: there is such a question; the message names the first.
        """
        some = any(question.answers for question in self.questions)
        for question in self.questions:
            if question.answers is None and some:
                raise UserError(
                    f"{self.path}: question {question.id} has no 'answers', unlike others; in "
                    "SQuAD 2.0, write an empty list for a question without an answer"
                )
            if question.answers == () and self.version == V1:
                raise UserError(
                    f"{self.path}: question {question.id} has no answer, unlike SQuAD 1.1; leave "
                    'it out, or write "version": "v2.0"'
                )


def read_squad(path: Path) -> Squad:
    """Read a file of SQuAD 1.1 or 2.0, which may be compressed (``.gz``).

    ``answers`` decides whether a question has an answer, and ``is_impossible``, if present, must
    agree. A question with ``is_impossible`` and without ``answers`` has no answer.

    Raises:
        UserError: the file cannot be read, is not a SQuAD file, or contradicts itself.
    """
    content = read_json(path)
    questions = list(_read_questions(content, str(path)))
    if not questions:
        raise UserError(f"{path}: holds no question")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"{path}: two questions have the id {question.id}")
        seen.add(question.id)
    squad = Squad(path, _determine_version(content, questions), questions)
    squad.refuse_missing_answers()
    return squad


def read_json(path: Path) -> Any:
    """Read a JSON file, which may be compressed.

    Raises:
        UserError: it cannot be read or is not JSON.
    """
    content = read_bytes(path)
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except RecursionError:
        raise UserError(f"{path}: cannot be read (it is nested too deeply)") from None
    except ValueError as error:  # not UTF-8, or a number has too many digits
        raise UserError(f"{path}: cannot be read ({error})") from None


def read_predictions(path: Path) -> dict[str, str]:
    """Read predicted answers by id.

    Raises:
        UserError: the file has other content.
    """
    return _read_map(path, (str,), "a text")


def read_odds(path: Path) -> dict[str, float]:
    """Read the odds, or probabilities, of no answer by id.

    Raises:
        UserError: the file has other content, or a value that is not finite.
    """
    odds = _read_map(path, (int, float), "a number")
    for key, value in odds.items():
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"{path}: the value of {key} is not a number: {value}")
    return odds


def _read_map(path: Path, kinds: tuple[type, ...], name: str) -> dict:
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object from ids to {name}")
    for key, value in content.items():
        if not isinstance(value, kinds):
            raise UserError(f"{path}: the value of {key} is not {name}")
    return content


def _determine_version(content: dict[str, Any], questions: list[Question]) -> str:
    """Determine the version; a file that does not name it is 2.0 if a question has no answer."""
    version = str(content.get("version", "")).lstrip("v")
    if version in (V1, V2):
        return version
    return V2 if any(question.answers == () for question in questions) else V1


def _read_questions(content: Any, path: str) -> Iterator[Question]:
    for number, article in enumerate(_read_field(content, "data", list, path)):
        where = f"{path}: data[{number}]"
        for index, paragraph in enumerate(_read_field(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{index}]"
            context = _read_field(paragraph, "context", str, place)
            for position, entry in enumerate(_read_field(paragraph, "qas", list, place)):
                yield _read_question(entry, context, f"{place}.qas[{position}]")


def _read_question(entry: Any, context: str, where: str) -> Question:
    text, name = _read_field(entry, "question", str, where), _read_field(entry, "id", str, where)
    impossible = entry.get("is_impossible")
    if not (impossible is None or isinstance(impossible, bool)):
        raise UserError(f"{where}, question {name}: 'is_impossible' must be true or false")
    if "answers" not in entry:
        return Question(name, text, context, () if impossible else None)
    answers = [
        Answer(
            _read_field(answer, "text", str, where), _read_field(answer, "answer_start", int, where)
        )
        for answer in _read_field(entry, "answers", list, where)
    ]
    if impossible is not None and impossible == bool(answers):
        has = f"{len(answers)} answers" if answers else "no answer"
        raise UserError(
            f"{where}, question {name}: 'is_impossible' is {str(impossible).lower()}, but it has "
            f"{has}; correct one of them"
        )
    return Question(name, text, context, tuple(answers))


def _read_field(entry: Any, name: str, kind: type[_T], where: str) -> _T:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        names = {list: "a list", str: "a text", int: "a number"}
        raise UserError(f"{where}: has no {name!r} that is {names[kind]}; is it a file of SQuAD?")
    _refuse_half_characters(value, f"{where}: {name!r}")
    return value


def _refuse_half_characters(value: object, where: str) -> None:
    """Refuse half surrogate pairs, which JSON can write and UTF-8 cannot."""
    try:
        if isinstance(value, str):
            value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where} has half a surrogate pair in it") from None
