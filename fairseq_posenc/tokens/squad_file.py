"""Reads SQuAD's JSON files (articles, paragraphs, questions, answers), and files of predictions.

``{"version": "1.1", "data": [{"paragraphs": [{"context": "Rome is old.", "qas": [{"id": "1",
"question": "What is old?", "answers": [{"text": "Rome", "answer_start": 0}]}]}]}]}``
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import read_bytes

V1, V2 = "1.1", "2.0"
_T = TypeVar("_T")


class Answer(NamedTuple):
    """An annotator's answer."""

    text: str
    start: int  # index of its first character in the context


class Question(NamedTuple):
    """A question about a paragraph."""

    id: str  # key of its prediction
    text: str  # the question
    context: str  # the paragraph
    # of several annotators; empty if the question has no answer, None if the file does not say
    answers: tuple[Answer, ...] | None


class Squad(NamedTuple):
    """A SQuAD file."""

    path: Path
    version: str  # `1.1`, where every question has an answer, or `2.0`
    questions: list[Question]  # in the order of the file

    @property
    def answered(self) -> bool:
        """Whether the file says what answers each question has, which test sets do not say."""
        return all(question.answers is not None for question in self.questions)


def read_squad(path: Path) -> Squad:
    """Read a file of SQuAD 1.1 or 2.0, which may be compressed (``.gz``).

    ``answers`` decides whether a question has an answer, and ``is_impossible``, if present, must
    agree. A question with ``is_impossible`` and without ``answers`` has no answer.

    Raises:
        UserError: the file cannot be read, is not a SQuAD file, or contradicts itself.
    """
    content = _read_json(path)
    questions = list(_read_questions(content, str(path)))
    if not questions:
        raise UserError(f"{path}: holds no question; name a SQuAD file with questions")
    most_common, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path}: two questions have the id {most_common}; give each its own")
    version = str(content.get("version")).lstrip("v")  # `v2.0` in the published files
    if version not in (V1, V2):  # a file that does not name it
        version = V2 if any(question.answers == () for question in questions) else V1
    some_have_answers = any(question.answers for question in questions)
    for question in questions:
        # A file without any answer is accepted: a test set may only say which questions have none.
        if question.answers is None and some_have_answers:
            raise UserError(
                f"{path}: question {question.id} has no 'answers', unlike others; in SQuAD 2.0, "
                "write an empty list for a question without an answer"
            )
        if question.answers == () and version == V1:
            raise UserError(
                f"{path}: question {question.id} has no answer, unlike SQuAD 1.1; leave it out, or "
                'write "version": "v2.0"'
            )
    return Squad(path, version, questions)


def _read_json(path: Path) -> Any:
    """Read a JSON file, which may be compressed; refuse one that cannot be read or is not JSON."""
    content = read_bytes(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON or UTF-8, too long a number, too deep
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def read_by_id(path: Path, value_type: type[_T]) -> dict[str, _T]:
    """Read a JSON object of values by id: predicted answers (str), or odds of no answer (float).

    Raises:
        UserError: the file has other content, or a number that is not finite.
    """
    content = _read_json(path)
    name = "a text" if value_type is str else "a finite number"
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object from ids to {name}")
    for key, value in content.items():
        is_number = type(value) is int or (type(value) is float and math.isfinite(value))
        if not (isinstance(value, str) if value_type is str else is_number):
            raise UserError(f"{path}: the value of {key} is not {name}")
    return content


def _read_questions(content: Any, path: str) -> Iterator[Question]:
    """Yield the questions of all paragraphs; errors name the place in the file."""
    for i, article in enumerate(_read_field(content, "data", list, path)):
        place = f"{path}: data[{i}]"
        for j, paragraph in enumerate(_read_field(article, "paragraphs", list, place)):
            place = f"{path}: data[{i}].paragraphs[{j}]"
            context = _read_field(paragraph, "context", str, place)
            for k, entry in enumerate(_read_field(paragraph, "qas", list, place)):
                yield _read_question(entry, context, f"{place}.qas[{k}]")


def _read_question(entry: Any, context: str, place: str) -> Question:
    text, question_id = (_read_field(entry, name, str, place) for name in ("question", "id"))
    impossible = entry.get("is_impossible")
    if "answers" not in entry:
        return Question(question_id, text, context, () if impossible else None)
    answers = []
    for item in _read_field(entry, "answers", list, place):
        answer_text = _read_field(item, "text", str, place)
        answers.append(Answer(answer_text, _read_field(item, "answer_start", int, place)))
    if impossible is not None and impossible != (not answers):
        found = "an answer" if answers else "no answer"
        raise UserError(
            f"{place}, question {question_id}: 'is_impossible' is {json.dumps(impossible)}, but "
            f"it has {found}; correct one of them"
        )
    return Question(question_id, text, context, tuple(answers))


def _read_field(entry: Any, name: str, field_type: type[_T], place: str) -> _T:
    """Read a field of a JSON object; refuse texts that UTF-8 cannot write."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if type(value) is not field_type:  # JSON's true is not a number
        types = {list: "a list", str: "a text", int: "a number"}
        raise UserError(f"{place}: has no {name!r} that is {types[field_type]}; is it SQuAD?")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # JSON's \ud800 is half a character
            raise UserError(f"{place}: {name!r} has half a surrogate pair in it") from None
    return value
