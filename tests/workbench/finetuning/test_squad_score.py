"""SQuAD's figures, beside the official scripts; and files of it that are refused."""

import gzip
import json
import math
import random
import re
import string
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from fairseq_posenc.tokens.squad_file import Answer, Question, Squad, read_by_id, read_squad
from fairseq_posenc.workbench.finetuning.squad import score
from fairseq_posenc.workbench.finetuning.squad.score import evaluate
from tests.helpers.commands import call, refused
from tests.helpers.preprocess import DATA, published, write_squad

WORDS = ["a", "An", "THE", "the", "than", "24-10", "café", "CafÉ", "!", "...", "“t”", "ü", "x"]
WORDS += ["X.", "theatre", "o'clock", "\u4e2d\u6587", "\uff01", "\u2019s", "\xa0", "\t", "I\u0307"]


def words_of(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(right, given, of_two):
    same = (Counter(right) & Counter(given)).total()
    if same == 0:
        return int(of_two and right == given)
    precision, recall = 1.0 * same / len(given), 1.0 * same / len(right)
    return (2 * precision * recall) / (precision + recall)


def official_scores(squad, predictions, of_two):
    """Compute the exact match and the F1 by id, as the script for 2.0 does or as that for 1.1."""
    exact, f1 = {}, {}
    for question in squad.questions:
        if question.id in predictions:
            given = words_of(predictions[question.id])
            rights = [words_of(answer.text) for answer in question.answers]
            if of_two:
                rights = [right for right in rights if right] or [[]]
            exact[question.id] = int(given in rights)
            f1[question.id] = max(overlap(right, given, of_two) for right in rights)
    return {"exact": exact, "f1": f1}


def official_v2(squad, predictions, odds=None, threshold=1.0):
    has = {question.id: bool(question.answers) for question in squad.questions}
    used = dict.fromkeys(predictions, 0.0) if odds is None else odds
    found = {}
    for kind, scores in official_scores(squad, predictions, of_two=True).items():
        final = {n: float(not has[n]) if used[n] > threshold else scores[n] for n in has}
        for prefix, kept in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            if names := [name for name in has if has[name] in kept]:
                found[f"{prefix}{kind}"] = 100.0 * sum(final[n] for n in names) / len(names)
                found[f"{prefix}total"] = len(names)
        if odds is not None:
            passed = [name for name in sorted(odds, key=odds.__getitem__) if name in has]
            gains = (scores[n] if has[n] else -bool(predictions[n]) for n in passed)
            totals = [*accumulate(gains, initial=sum(not answered for answered in has.values()))]
            best = totals.index(max(totals))  # the first of equals
            found[f"best_{kind}"] = 100.0 * totals[best] / len(has)
            found[f"best_{kind}_thresh"] = odds[passed[best - 1]] if best else 0.0
    return found


def draw(seed, version):
    """Draw a file and predictions for it, some of them nearly right; return the generator, too."""
    rng = random.Random(seed)
    questions, predictions = [], {"of another file": "x"}
    for name in (f"q{number}" for number in range(rng.randint(1, 30))):
        count = rng.randint(2, 4) if version == "1.1" or rng.random() < 0.5 else 1
        other, *golds = (" ".join(rng.choices(WORDS, k=rng.randint(0, 4))) for _ in range(count))
        questions.append(Question(name, "?", "", tuple(Answer(gold, 0) for gold in golds)))
        gold = rng.choice(golds or [""])
        near = gold.upper() + rng.choice(["", ".", " the", " x"])
        predictions[name] = rng.choice([other, near, gold, ""])
    return rng, Squad(Path("random.json"), version, questions), predictions


@pytest.mark.parametrize("seed", range(30))
def test_figures_of_1_1_are_the_official_ones(seed, monkeypatch):
    """The script adds score after score; the ``sum`` of Python 3.12 rounds but once, as fsum."""
    monkeypatch.setattr(score, "sum", math.fsum, raising=False)
    rng, squad, predictions = draw(seed, "1.1")
    given = {name: text for name, text in predictions.items() if rng.random() > 0.2}
    scores = official_scores(squad, given, of_two=False)
    sums = [[*accumulate(scores[kind].values(), initial=0)][-1] for kind in ("exact", "f1")]
    means = [100.0 * found / len(squad.questions) for found in sums]
    assert evaluate(squad, given) == dict(zip(("exact_match", "f1"), means))


@pytest.mark.parametrize("seed", range(30))
def test_figures_of_2_0_are_the_official_ones(seed):
    rng, squad, predictions = draw(seed, "2.0")
    assert evaluate(squad, predictions) == official_v2(squad, predictions)
    names = rng.sample(list(predictions), len(predictions))
    odds = {name: rng.choice([0, 0.5, 1.0, 1.5, -3.25, rng.gauss(0, 3)]) for name in names}
    for threshold in (1.0, 0.0, 0.5, -2.0):
        given = predictions, odds, threshold
        assert evaluate(squad, *given) == official_v2(squad, *given)


@published
def test_a_published_baseline_gets_its_published_score():
    squad = read_squad(DATA / "squad" / "dev-v1.1.json.gz")
    assert (squad.version, len(squad.questions)) == ("1.1", 10_570)
    path = DATA / "squad" / "predictions" / "dev-v1.1-logistic-regression.json.gz"
    figures = evaluate(squad, read_by_id(path, str))
    assert figures == pytest.approx({"exact_match": 40.1419, "f1": 50.9815}, rel=0, abs=5e-5)


CAT, NOTHING = {"answers": ["the cat"]}, {"answers": [], "is_impossible": True}
CLAIMED, DENIED = {**CAT, "is_impossible": True}, {"answers": [], "is_impossible": False}
V1, V2 = ("1.1", CAT), ("v2.0", CAT, NOTHING)


def write_score(folder, asked, predictions, odds=None, *more):
    """Write a file of a version and its questions, or of bytes; return the words to score it."""

    def write(name, content):
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    if isinstance(asked, bytes):
        data = write("dev.json.gz" if asked[:1] == b"\x1f" else "dev.json", asked)
    else:
        data = write_squad(folder / "dev.json", {"a cat": asked[1:]}, asked[0])
    more = more if odds is None else ["--na-prob-file", write("odds.json", odds), *more]
    return ["squad", "score", data, write("answers.json", predictions), *more]


def test_the_command_prints_what_the_official_scripts_print(tmp_path, capsys):
    predictions, odds = {"q1": "Cat!", "q2": "mat"}, {"q1": -1.5, "q2": 10**400}
    found = call(capsys, *write_score(tmp_path, V1, predictions))
    assert found == ('{"exact_match": 100.0, "f1": 100.0}\n', "")
    found = call(capsys, *write_score(tmp_path, V1, {}))
    unanswered = "unanswered questions get score 0: 1; the first is q1\n"
    assert found == ('{"exact_match": 0.0, "f1": 0.0}\n', unanswered)
    out, _ = call(capsys, *write_score(tmp_path, V2, predictions, odds, "--na-prob-thresh", 0))
    squad = read_squad(tmp_path / "dev.json")
    assert json.loads(out) == official_v2(squad, predictions, {"q1": -1.5, "q2": 3}, 0.0)
    assert out.startswith('{\n  "exact": 100.0,\n  "f1": 100.0,\n  "total": 2,\n  "HasAns_exact"')


BOTH = {"q1": "x", "q2": ""}
BROKEN = b'{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "\\ud800"}]}]}]}'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((V2, {"q1": "x"}), "predictions: 1 of 2 questions are missing, the first is q2; "),
        ((V2, BOTH, {"q1": 0}), "odds of no answer: 1 of 2 questions are missing"),
        ((V1, {"q1": "x"}, {"q1": 0}), "dev.json: odds of no answer are for SQuAD 2.0"),
        ((V1, {"q1": None}), "the value of q1 is not a text"),
        ((V1, ["q1"]), "answers.json: must be a JSON object from ids to a text"),
        ((V1, b"\xff"), "answers.json: cannot be read as JSON ("),
        ((V2, BOTH, {"q1": 0, "q2": math.nan}), "q2 is not a finite number"),
        ((V2, BOTH, None, "--na-prob-thresh=inf"), "from -1e+300 to 1e+300, not 'inf'"),
        ((V2, BOTH, None, "--na-prob-thresh=0"), "--na-prob-thresh: needs --na-prob-file"),
        ((("v2.0", {}, {}), {}), "dev.json: has no answers, so nothing can be scored"),
        ((b'{"data":\n [,]}', {}), "dev.json: cannot be read as JSON (Expecting value: line 2"),
        ((b"[" * 200_000 + b"]" * 200_000, {}), "dev.json: cannot be read as JSON ("),
        ((gzip.compress(b"{}" * 5000)[:30], {}), "dev.json.gz: cannot be read ("),
        ((b'{"rows": []}', {}), "dev.json: has no 'data' that is a list; "),
        ((BROKEN, {}), "dev.json: data[0].paragraphs[0].qas[0]: 'question' has half a "),
        ((b'{"data": []}', {}), "dev.json: holds no question"),
        ((("v2.0", CAT, CLAIMED), {}), "q2: 'is_impossible' is true, but it has an answer"),
        ((("1.1", CAT, CLAIMED), {}), "q2: 'is_impossible' is true, but it has an answer"),
        ((("v2.0", CAT, DENIED), {}), "qas[1], question q2: 'is_impossible' is false, but"),
        ((("v2.0", CAT, {}), {}), "dev.json: question q2 has no 'answers', unlike others; in"),
        ((("1.1", CAT, {"answers": []}), {}), "dev.json: question q2 has no answer, unlike SQuAD"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, given, message):
    assert message in refused(capsys, *write_score(tmp_path, *given))


def test_whether_a_question_has_an_answer_need_not_be_said_twice(tmp_path):
    for version, entry, texts in (
        ("v2.0", {"answers": []}, []),
        ("v2.0", {"is_impossible": True}, []),
        ("1.1", {**CAT, "is_impossible": False}, ["the cat"]),
        (None, {"answers": []}, []),
    ):
        path = write_squad(tmp_path / "dev.json", {"a cat": [CAT, entry]}, version)
        assert [answer.text for answer in read_squad(path).questions[1].answers] == texts
