"""SQuAD's scores: a figure unlike the official scripts', or of a file that says two things."""

import gzip
import json
import math
import random
import re
import string
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.squad_file import Answer, Question, Squad, read_by_id, read_squad
from fairseq_posenc.tokens.squad_windows import write_split
from fairseq_posenc.workbench.finetuning.squad import score as scoring
from fairseq_posenc.workbench.finetuning.squad.score import evaluate
from tests.helpers.commands import call, refused
from tests.helpers.preprocess import DATA, write_squad
from tests.helpers.products import WHOLE

PUBLISHED = DATA / "squad"
SEEDS = range(150 if WHOLE else 30)
WORDS = ["a", "An", "THE", "the", "than", "24-10", "café", "CafÉ", "!", "...", "“t”", "ü", "x"]
WORDS += ["X.", "theatre", "o'clock"]
WORDS += ["\u4e2d\u6587", "\uff01", "\u2019s", "\u00a0", "\t", "I\u0307"]


def words_of(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(right, given):
    same = (Counter(right) & Counter(given)).total()
    if same == 0:
        return 0
    precision, recall = 1.0 * same / len(given), 1.0 * same / len(right)
    return (2 * precision * recall) / (precision + recall)


def official_v1(squad, predictions):
    exact = f1 = 0
    for question in squad.questions:
        if question.id in predictions:
            given = words_of(predictions[question.id])
            rights = [words_of(answer.text) for answer in question.answers]
            exact += max(" ".join(right) == " ".join(given) for right in rights)
            f1 += max(overlap(right, given) for right in rights)
    total = len(squad.questions)
    return {"exact_match": 100.0 * exact / total, "f1": 100.0 * f1 / total}


def official_v2(squad, predictions, odds=None, threshold=1.0):
    has = {question.id: bool(question.answers) for question in squad.questions}
    raw = {"exact": {}, "f1": {}}
    for question in squad.questions:
        given = words_of(predictions[question.id])
        rights = [words for answer in question.answers if (words := words_of(answer.text))] or [[]]
        raw["exact"][question.id] = max(int(right == given) for right in rights)
        raw["f1"][question.id] = max(
            overlap(right, given) if right and given else int(right == given) for right in rights
        )
    used = dict.fromkeys(predictions, 0.0) if odds is None else odds
    found = {}
    for kind, scores in raw.items():
        final = {n: float(not has[n]) if used[n] > threshold else scores[n] for n in has}
        for prefix, kept in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            if names := [name for name in has if has[name] in kept]:
                found[f"{prefix}{kind}"] = 100.0 * sum(final[n] for n in names) / len(names)
                found[f"{prefix}total"] = len(names)
        if odds is not None:
            score = best = sum(1 for name in has if not has[name])
            where = 0.0
            for name in sorted(odds, key=lambda n: odds[n]):
                if name in has:
                    wrong = -1 if predictions[name] else 0
                    score += scores[name] if has[name] else wrong
                    if score > best:
                        best, where = score, odds[name]
            found |= {f"best_{kind}": 100.0 * best / len(has), f"best_{kind}_thresh": where}
    return found


def draw(seed, version):
    """Draw a file and predictions for it, some of them nearly right; return the generator, too."""
    rng = random.Random(seed)
    questions, predictions = [], {"of another file": "x"}
    for name in (f"q{number}" for number in range(rng.randint(1, 30))):
        count = rng.randint(1, 3) if version == "1.1" or rng.random() < 0.5 else 0
        *golds, other = (
            " ".join(rng.choices(WORDS, k=rng.randint(0, 4))) for _ in range(count + 1)
        )
        questions.append(Question(name, "?", "", tuple(Answer(gold, 0) for gold in golds)))
        gold = rng.choice(golds or [""])
        near = gold.upper() + rng.choice(["", ".", " the", " x"])
        predictions[name] = rng.choice([other, near, gold, ""])
    return rng, Squad(Path("random.json"), version, questions), predictions


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_of_1_1_are_the_official_ones(seed, monkeypatch):
    """The script adds score after score; the ``sum`` of Python 3.12 rounds but once, as fsum."""
    monkeypatch.setattr(scoring, "sum", math.fsum, raising=False)
    rng, squad, predictions = draw(seed, "1.1")
    given = {name: text for name, text in predictions.items() if rng.random() > 0.2}
    assert evaluate(squad, given) == official_v1(squad, given)


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_of_2_0_are_the_official_ones(seed):
    rng, squad, predictions = draw(seed, "2.0")
    assert evaluate(squad, predictions) == official_v2(squad, predictions)
    names = rng.sample(list(predictions), len(predictions))
    odds = {name: rng.choice([0, 0.5, 1.0, 1.5, -3.25, rng.gauss(0, 3)]) for name in names}
    for threshold in (1.0, 0.0, 0.5, -2.0):
        ours = evaluate(squad, predictions, odds, threshold)
        assert ours == official_v2(squad, predictions, odds, threshold)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published files are not there")
def test_a_published_baseline_gets_its_published_score():
    squad = read_squad(PUBLISHED / "dev-v1.1.json.gz")
    assert (squad.version, len(squad.questions)) == ("1.1", 10_570)
    path = PUBLISHED / "predictions" / "dev-v1.1-logistic-regression.json.gz"
    figures = evaluate(squad, read_by_id(path, str))
    assert figures == pytest.approx({"exact_match": 40.1419, "f1": 50.9815}, rel=0, abs=5e-5)


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


CAT, NOTHING = {"answers": ["the cat"]}, {"answers": [], "is_impossible": True}


@pytest.fixture
def files(tmp_path):
    """Write a file of each version; returns their paths."""
    asked = {"1.1": [CAT], "v2.0": [CAT, NOTHING]}
    return {v: write_squad(tmp_path / f"dev-{v}.json", {"a cat": asked[v]}, v) for v in asked}


def test_the_command_prints_what_the_official_scripts_print(files, tmp_path, capsys):
    score = partial(call, capsys, "squad", "score")
    predictions = write(tmp_path / "answers.json", {"q1": "Cat!", "q2": "mat"})
    assert score(files["1.1"], predictions) == ('{"exact_match": 100.0, "f1": 100.0}\n', "")
    assert score(files["1.1"], write(tmp_path / "none.json", {})) == (
        '{"exact_match": 0.0, "f1": 0.0}\n',
        "1 unanswered questions receive score 0; the first is q1\n",
    )
    odds = write(tmp_path / "odds.json", {"q1": -1.5, "q2": 10**400})
    out, _ = score(files["v2.0"], predictions, "--na-prob-file", odds, "--na-prob-thresh", 0)
    squad = read_squad(files["v2.0"])
    expected = official_v2(squad, {"q1": "Cat!", "q2": "mat"}, {"q1": -1.5, "q2": 3}, 0.0)
    assert json.loads(out) == expected
    assert out.startswith('{\n  "exact": 100.0,\n  "f1": 100.0,\n  "total": 2,\n  "HasAns_exact"')


BOTH = {"q1": "x", "q2": ""}


@pytest.mark.parametrize(
    ("version", "predictions", "odds", "message"),
    [
        ("v2.0", {"q1": "x"}, "", "predictions: 1 of 2 questions are missing, the first is q2; "),
        ("v2.0", BOTH, {"q1": 0}, "odds of no answer: 1 of 2 questions are missing"),
        ("1.1", {"q1": "x"}, {"q1": 0}, "dev-1.1.json: odds of no answer are for SQuAD 2.0"),
        ("1.1", {"q1": None}, "", "the value of q1 is not a text"),
        ("1.1", ["q1"], "", "answers.json: must be a JSON object from ids to a text"),
        ("v2.0", BOTH, {"q1": 0, "q2": math.nan}, "q2 is not a finite number"),
        ("v2.0", BOTH, "--na-prob-thresh=inf", "must be a finite number, not 'inf'"),
        ("v2.0", BOTH, "--na-prob-thresh=0", "--na-prob-thresh: needs --na-prob-file, whose odds"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, capsys, version, predictions, odds, message):
    if isinstance(odds, dict):
        odds = f"--na-prob-file={write(tmp_path / 'odds.json', odds)}"
    words = [files[version], write(tmp_path / "answers.json", predictions), *odds.split()]
    assert message in refused(capsys, "squad", "score", *words)


@pytest.mark.parametrize(
    ("version", "entry", "found"),
    [
        ("v2.0", {**CAT, "is_impossible": True}, "is true, but it has an answer"),
        ("v2.0", {"answers": [], "is_impossible": False}, "is false, but it has no answer; corr"),
        ("v2.0", {"answers": []}, ()),
        ("v2.0", {"is_impossible": True}, ()),
        ("v2.0", {}, "has no 'answers', unlike others; in SQuAD 2.0, write an"),
        ("1.1", {"answers": []}, "has no answer, unlike SQuAD 1.1; leave it out, or"),
        ("1.1", {**CAT, "is_impossible": True}, "is true, but it has an answer"),
        ("1.1", {**CAT, "is_impossible": False}, ("the cat",)),
        (None, {"answers": []}, ()),
    ],
)
def test_whether_a_question_has_an_answer_is_said_once(tmp_path, version, entry, found):
    """A file that contradicts itself is refused by the question, for training and for scoring."""
    path = write_squad(tmp_path / "dev.json", {"a cat": [CAT, entry]}, version)
    if isinstance(found, str):
        with pytest.raises(UserError, match=f"{path}.*question q2.*{found}"):
            read_squad(path)
    else:
        assert tuple(answer.text for answer in read_squad(path).questions[1].answers) == found


def test_a_test_set_has_no_answers_at_all(tmp_path):
    squad = read_squad(write_squad(tmp_path / "test.json", {"a cat": [{}, {}]}, "v2.0"))
    assert not squad.answered
    with pytest.raises(UserError, match=r"test.json: has no answers, so nothing can be scored"):
        evaluate(squad, {})
    with pytest.raises(UserError, match=r"test.json: has no answers, so nothing can be learnt"):
        write_split(squad, None, tmp_path / "train")


NOT_SQUAD = {
    "broken.json": (b'{"data":\n [,]}', "cannot be read as JSON (Expecting value: line 2 column 3"),
    "deep.json": (b"[" * 200_000 + b"]" * 200_000, "cannot be read as JSON ("),
    "bytes.json": (b"\xff", "cannot be read as JSON ("),
    "cut.json.gz": (gzip.compress(b"{}" * 5000)[:30], "cannot be read ("),
    "missing.json.gz": (b"", "cannot be read ("),
    "rows.json": (b'{"rows": []}', "has no 'data' that is a list; "),
    "half_a_character.json": (
        b'{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "\\ud800"}]}]}]}',
        "data[0].paragraphs[0].qas[0]: 'question' has half a ",
    ),
    "empty.json": (b'{"data": []}', "holds no question"),
}


@pytest.mark.parametrize("name", NOT_SQUAD)
def test_files_that_are_no_squad_are_shown_with_the_place(tmp_path, name):
    path, (content, message) = tmp_path / name, NOT_SQUAD[name]
    if content:
        path.write_bytes(content)
    readers = [read_squad, lambda path: read_by_id(path, str)]
    for read in readers if message.startswith("cannot") else readers[:1]:
        with pytest.raises(UserError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {message}")
