"""SQuAD but for training: a token, window, loss, best answer or figure unlike its definition."""

import gzip
import json
import math
import random
import re
import string
from argparse import Namespace
from collections import Counter
from functools import cache, partial
from itertools import accumulate, combinations_with_replacement
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary, data_utils
from fairseq.logging import metrics
from tokenizers import ByteLevelBPETokenizer

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.tasks.squad.criterion import SquadCriterion
from fairseq_posenc.tasks.squad.databin import MANIFEST, Limits, SquadDataBin, open_data_bin
from fairseq_posenc.tokens import squad_windows
from fairseq_posenc.tokens.squad_file import Answer, Question, Squad, read_by_id, read_squad
from fairseq_posenc.tokens.subwords import GPT2, PieceEncoder, Pieces
from fairseq_posenc.tokens.tokenizer import TextTokens
from fairseq_posenc.workbench.finetuning.squad import predict, score
from fairseq_posenc.workbench.finetuning.squad.score import evaluate
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.commands import call, new_directory, refused
from tests.helpers.exchanged import write_release
from tests.helpers.preprocess import DATA, fairseqs_bpe, write_bpe, write_pieces, write_squad
from tests.helpers.products import WHOLE, some_of
from tests.helpers.tiny_models import make_model

published = pytest.mark.skipif(not DATA.is_dir(), reason="the published files are not there")
TEXTS = [
    "  Zoë Müller was born in København (北京?) in 1912. ",
    "e\u0301t\u0301e 😀😀x\n\nthe\u00a0 ﬁsh ate ½ of ㎏, it's 3–4%\t!",
    "the cat sat on the mat, and the cat's mat was the best mat that there was",
    "",
    " ",
]


def read_bpe(folder):
    dictionary = load_dictionary(folder / "dict.txt")
    return GPT2(folder / "encoder.json", folder / "vocab.bpe", dictionary), dictionary


@cache
def tokenizer(kind):
    folder = new_directory()
    if kind == "bpe":
        return read_bpe(write_bpe(folder, TEXTS))[0]
    options = {"byte_fallback": True, "character_coverage": 0.98} if kind != "unigram" else {}
    lines = [text for text in TEXTS if text.strip()] * 20
    pieces = Pieces(write_pieces(folder, 330, lines, **options))
    return PieceEncoder(pieces, pieces.build_dictionary())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte_fallback"])
def test_the_tokens_of_words_have_their_characters_and_no_others(kind, text):
    tokens = tokenizer(kind).tokens(text)
    words = [word.span() for word in re.finditer(r"\S+", text)]
    for (start, _), (_, end) in combinations_with_replacement(words, 2):
        first, last = tokens.covering(start, end)
        assert text[tokens.starts[first] : tokens.ends[last]] == text[start:end]
        needed = np.flatnonzero((tokens.ends > start) & (tokens.starts < end))
        assert [*range(first, last + 1)] == needed.tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_bytes_are_those_of_another_library(tmp_path, text):
    encoder, dictionary = read_bpe(write_bpe(tmp_path, TEXTS))
    files = str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe")
    ours, theirs = encoder.tokens(text), ByteLevelBPETokenizer(*files).encode(text)
    assert ours.ids.tolist() == [dictionary.index(str(number)) for number in theirs.ids]
    assert dictionary.unk() not in ours.ids
    for start, end, (begun, ended) in zip(ours.starts, ours.ends, theirs.offsets):
        piece = text[begun:ended]
        assert (text[start:end], end) == (piece.lstrip() or piece, ended)


@published
def test_every_published_answer_is_found_in_tokens():
    squad = read_squad(DATA / "squad" / "dev-v1.1.json.gz")
    encoder, dictionary = read_bpe(DATA / "gpt2_bpe")
    maker = squad_windows.WindowMaker(encoder, dictionary, Limits())
    same, matches = [], []
    for question in squad.questions[:: 9 if WHOLE else 90]:
        tokens = maker.tokenize_context(question.context)
        assert dictionary.unk() not in tokens.ids
        for answer in question.answers:
            assert squad_windows.locate_answer(question.context, answer) == answer.start
            first, last = tokens.covering(answer.start, answer.start + len(answer.text))
            found = question.context[tokens.starts[first] : tokens.ends[last]]
            assert answer.text.strip() in found
            same.append(found == answer.text)
            matches.append(score.exact(answer.text, found))
    assert len(same) > (3_000 if WHOLE else 300)
    assert np.mean(same) > 0.985
    assert np.mean(matches) > 0.995  # what a perfect model could reach


@pytest.mark.parametrize("seed", range(60))
def test_windows_hold_the_whole_context_and_each_token_has_one_best(seed):
    rng = random.Random(seed)
    limits = Limits(rng.randint(12, 40), rng.randint(1, 6), rng.randint(1, 5))
    question = np.arange(100, 100 + rng.randint(1, 9))
    context = np.arange(1000, 1000 + rng.choice([0, 1, rng.randint(2, 90)]))
    asked = question[: limits.max_question].tolist()
    room, stride = limits.max_length - len(asked) - 4, limits.stride
    begins = [0, *range(stride, len(context) - room + stride, stride)]  # until one has the end
    parts = {begin: context[begin : begin + room].tolist() for begin in begins}

    def find_best(token):  # BERT's rule, and the first of equals
        scores = {
            begin: min(part.index(token), part[::-1].index(token)) + 0.01 * len(part)
            for begin, part in parts.items()
            if token in part
        }
        return max(scores, key=scores.__getitem__)

    windows = squad_windows.make_windows(question, context, limits, Dictionary())
    for window, (begin, part) in zip(windows, parts.items(), strict=True):
        assert window.tokens.tolist() == [0, *asked, 2, 2, *part, 2]  # <s> is 0, </s> is 2
        assert (window.first, window.offset) == (begin, 1 + len(asked) + 2)
        assert window.has_max_context.tolist() == [find_best(token) == begin for token in part]


def test_limits_that_lose_tokens_are_refused():
    Limits(40, 6, 30).check()
    Limits(6, 1, 1).check()
    with pytest.raises(UserError) as short:
        SquadDataBin(Path("bin"), "1.1", Limits(), 1).check_lengths(64, "a model")
    Limits(*map(int, re.findall(r"--\S+ (\d+)", str(short.value)))).check()
    for limits, wrong in (
        (Limits(40, 7, 30), "--stride 7: give 1 to 6, as --max-length 40 leaves 6 tokens of cont"),
        (Limits(10, 1, 10), "--max-question 10: give 1 to 5, as --max-length 10 leaves 6 tokens"),
        (Limits(5, 1, 1), "--max-length 5: give 6 or more"),
    ):
        with pytest.raises(UserError, match=wrong):
            limits.check()


@pytest.mark.parametrize(
    ("make", "cause"),
    [(Path.mkdir, "Is a directory"), (lambda path: path.symlink_to(path), "symbolic links")],
    ids=["folder", "link_loop"],
)
def test_a_manifest_that_cannot_be_read_is_shown(make, cause, tmp_path):
    make(tmp_path / MANIFEST)
    with pytest.raises(
        UserError, match=f"was not made by fairseq-posenc preprocess squad.*{cause}"
    ):
        open_data_bin(tmp_path)


def test_an_answer_at_another_place_is_found_nearest_by():
    context = "one two one two one"
    for text, start, found in (("two", 4, 4), ("two", 11, 12), ("one", -3, 0), ("three", 0, None)):
        assert squad_windows.locate_answer(context, Answer(text, start)) == found
    assert squad_windows.locate_answer(context, Answer("one", 12)) in (8, 16)


def test_targets_point_at_the_answer_and_what_is_lost_is_counted(tmp_path):
    context = " ".join(f"w{number}" for number in range(60))
    asked = {
        "found": [Answer("w40 w41", context.index("w40"))],
        "moved": [Answer("w7", 0)],
        "second": [Answer("w99", 0), Answer("w8", 24)],
        "lost": [Answer("w99", 0)],
        "blank": [Answer("", 5), Answer(" ", 2)],
        "none": [],
        "wide": [Answer(context, 0)],
        "cut " * 20: [Answer("w0", 0)],
    }
    questions = [Question(x, x, context, tuple(answers)) for x, answers in asked.items()]
    encoder, dictionary = read_bpe(write_bpe(tmp_path, [context, *asked], merges=5))
    maker = squad_windows.WindowMaker(encoder, dictionary, Limits(80, 20, 12))
    counts = squad_windows.write_split(
        Squad(Path("x.json"), "2.0", questions), maker, tmp_path / "train"
    )
    stored = data_utils.load_indexed_dataset(str(tmp_path / "train"), dictionary)
    spans = np.load(tmp_path / "train.spans.npy")
    found = [
        fairseqs_bpe(tmp_path).decode([int(dictionary[x]) for x in tokens[start : end + 1]]).strip()
        for tokens, (start, end) in zip(stored, spans)
        if (start, end) != (0, 0)
    ]
    assert set(found) == {"w40 w41", "w7", "w8", "w0"}
    assert max(map(len, stored)) <= 80
    assert len(stored) == len(spans)
    assert counts == {
        **{"questions": 8, "questions_left_out": 2, "questions_cut": 1, "unknown_tokens": 0},
        **{"questions_without_answer": 1, "answers_moved": 1, "answers_in_no_window": 1},
        **{"windows": len(spans), "windows_with_answer": len(found)},
        **{"tokens": sum(map(len, stored))},
    }


TOKENS = torch.tensor([[0, 5, 6, 2, 2, 7, 8, 9, 2], [0, 9, 2, 2, 6, 2, 1, 1, 1]])


def with_head():
    model = make_model("masked_lm", position_encoding="learned+m4m")
    model.register_span_head()
    return model


def test_scores_are_those_of_a_linear_layer_without_padding_in_float32():
    model = with_head()
    features, _ = model(TOKENS, features_only=True)
    layer = model.span_head.scores
    expected = (features @ layer.weight.T + layer.bias).unbind(-1)
    for ours, theirs in zip(model(TOKENS, span_scores=True), expected):
        torch.testing.assert_close(ours, theirs.masked_fill(TOKENS == 1, -math.inf))
    halved = model.to(torch.bfloat16)(TOKENS, span_scores=True)
    assert {scores.dtype for scores in halved} == {torch.float32}


def test_a_head_starts_fresh_on_a_pretrained_model_and_is_kept_on_a_fine_tuned_one():
    pretrained = make_model("masked_lm", position_encoding="learned+m4m")
    model, again = with_head(), with_head()
    before = model.span_head.scores.weight.clone()
    assert before.std() < 0.03  # BERT's weights: 0.02
    assert not model.span_head.scores.bias.any()
    model.load_state_dict(pretrained.state_dict(), strict=True)
    assert torch.equal(model.span_head.scores.weight, before)
    tuned = {k: v if is_identity(k) else v + 1 for k, v in model.state_dict().items()}
    again.load_state_dict(dict(tuned), strict=True)
    assert torch.equal(again.span_head.scores.weight, before + 1)
    pretrained.load_state_dict(dict(tuned), strict=True)  # the head is left out
    assert "span_head.scores.weight" not in pretrained.state_dict()


def test_the_loss_is_the_cross_entropy_of_both_ends_and_ranks_add_up():
    model, criterion = with_head(), SquadCriterion(SimpleNamespace())
    targets = {"starts": torch.tensor([5, 0]), "ends": torch.tensor([6, 4])}

    def compute(rows):
        tokens = TOKENS[rows]
        numbers = {"net_input": {"src_tokens": tokens}, "ntokens": int((tokens != 1).sum())}
        return criterion(model, numbers | {name: x[rows] for name, x in targets.items()})

    (loss, size, logged), *halves = [compute(rows) for rows in ([0, 1], [0], [1])]
    both = [scores.detach() for scores in model(TOKENS, span_scores=True)]
    terms = [F.cross_entropy(*pair, reduction="sum") for pair in zip(both, targets.values())]
    expected = float(sum(terms)) / 2
    assert (float(loss.detach()), size) == (pytest.approx(expected, rel=1e-5), 2)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.span_head.scores.weight.grad.abs().sum() > 0
    ranks = [half[2] for half in halves]
    summed = {key: sum(rank[key] for rank in ranks) for key in logged}
    means = {"loss": pytest.approx(expected / 2 / math.log(2), abs=1e-3)}
    for side, scores, right in zip(("start", "end"), both, targets.values()):
        means[f"{side}_accuracy"] = 100 * (scores.argmax(-1) == right).float().mean().item()
    for outputs in ([logged], ranks, [summed]):
        with metrics.aggregate(new_root=True) as meters:
            SquadCriterion.reduce_metrics(outputs)
        assert meters.get_smoothed_values() == means


@pytest.mark.parametrize("seed", range(30))
def test_best_spans_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    context = np.arange(rng.integers(1, 90))
    for window in squad_windows.make_windows(
        np.arange(3), context, Limits(50, 17, 3), Dictionary()
    ):
        start, end = rng.normal(size=(2, len(window.tokens)))
        size, at = len(window.has_max_context), window.offset
        sums = {
            (window.first + first, window.first + last): start[at + first] + end[at + last]
            for first in range(size)
            for last in range(first, min(first + predict.MAX_ANSWER, size))
            if window.has_max_context[first]
        }
        expected = sorted(sums.items(), key=lambda item: -item[1])[: predict.NBEST]
        found = predict.find_best_spans(window, start, end)
        assert [((first, last), score) for first, last, score in found.spans] == expected
        assert found.null == start[0] + end[0]


def test_windows_together_give_the_best_text_and_the_surest_that_there_is_one():
    context = "  the cat, the\n cat "
    spans = [(2, 5), (6, 9), (9, 10), (11, 14), (14, 15), (16, 19)]
    tokens = TextTokens(np.arange(6), *(np.array(side) for side in zip(*spans)))
    first = [predict.Guess(0, 1, 5.0), predict.Guess(1, 1, 3.0)]
    second = [predict.Guess(3, 5, 6.0), predict.Guess(5, 5, 4.0), predict.Guess(4, 4, 9.0)]
    scored = [predict.WindowSpans(first, null=2.0), predict.WindowSpans(second, null=7.0)]
    found = predict.combine_windows("q", context, tokens, scored)
    assert found == ("q", "the\n cat", 2.0 - 6.0)  # the span with 9.0 has no text
    empty = predict.WindowSpans([], null=1.0)
    assert predict.combine_windows("q", "", tokens, [empty]) == ("q", "", 0.0)
    assert predict.Predictor(with_head(), None, "learned").predict([], max_tokens=64) == []


OURS = some_of(["learned+m4m(max_distance=5)"], ["learned+m4m(max_distance=5)", "rope", "none"])


@pytest.mark.parametrize(
    ("arch", "options", "spec"),
    [
        *(("roberta_none_tiny", {"position_encoding": spec}, spec) for spec in OURS),
        ("roberta", {}, "learned"),
        ("roberta", {"encoder_learned_pos": False}, "sinusoidal(layout=fairseq)"),
        ("roberta", {"no_token_positional_embeddings": True}, "none"),
    ],
)
def test_a_model_and_fairseqs_own_are_built_again_from_a_checkpoint(arch, options, spec):
    """As older fairseqs wrote it, with which RoBERTa was released."""
    directions = "" if arch == "roberta" else "lr,rl"
    model = make_model("masked_lm", arch, attention_directions=directions, **options)
    args = Namespace(**(vars(model.args) | {"arch": arch, "task": "masked_lm", "data": "x"}))
    pretrained = read_pretrained(write_release(args, model.state_dict()))
    assert str(pretrained.spec) == pretrained.roberta_section["position_encoding"] == spec
    assert pretrained.roberta_section.get("attention_directions", "") == directions
    assert (pretrained.max_positions, pretrained.dictionary.size) == (24, 24)
    rebuilt = make_model("masked_lm", **pretrained.roberta_section)
    rebuilt.load_state_dict(torch.load(pretrained.path)["model"], strict=True)
    torch.testing.assert_close(rebuilt(TOKENS)[0], model(TOKENS)[0])
    args.attention_directions = "lr,up"
    with pytest.raises(UserError, match="unknown direction 'up'"):
        read_pretrained(write_release(args, model.state_dict()))


SEEDS = range(150 if WHOLE else 30)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_of_1_1_are_the_official_ones(seed, monkeypatch):
    """The script adds score after score; the ``sum`` of Python 3.12 rounds but once, as fsum."""
    monkeypatch.setattr(score, "sum", math.fsum, raising=False)
    rng, squad, predictions = draw(seed, "1.1")
    given = {name: text for name, text in predictions.items() if rng.random() > 0.2}
    scores = official_scores(squad, given, of_two=False)
    sums = [[*accumulate(scores[kind].values(), initial=0)][-1] for kind in ("exact", "f1")]
    means = [100.0 * found / len(squad.questions) for found in sums]
    assert evaluate(squad, given) == dict(zip(("exact_match", "f1"), means))


@pytest.mark.parametrize("seed", SEEDS)
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
    unanswered = "1 unanswered questions receive score 0; the first is q1\n"
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
        ((V2, BOTH, None, "--na-prob-thresh=inf"), "must be a finite number, not 'inf'"),
        (
            (V2, BOTH, None, "--na-prob-thresh=0"),
            "--na-prob-thresh: needs --na-prob-file, whose odds",
        ),
        ((("v2.0", {}, {}), {}), "dev.json: has no answers, so nothing can be scored"),
        (
            (b'{"data":\n [,]}', {}),
            "dev.json: cannot be read as JSON (Expecting value: line 2 column 3",
        ),
        ((b"[" * 200_000 + b"]" * 200_000, {}), "dev.json: cannot be read as JSON ("),
        ((b"\xff", {}), "dev.json: cannot be read as JSON ("),
        ((gzip.compress(b"{}" * 5000)[:30], {}), "dev.json.gz: cannot be read ("),
        ((b'{"rows": []}', {}), "dev.json: has no 'data' that is a list; "),
        ((BROKEN, {}), "dev.json: data[0].paragraphs[0].qas[0]: 'question' has half a "),
        ((b'{"data": []}', {}), "dev.json: holds no question"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, given, message):
    assert message in refused(capsys, *write_score(tmp_path, *given))


@pytest.mark.parametrize("read", [read_squad, partial(read_by_id, value_type=str)])
def test_a_missing_file_is_shown_with_its_path(tmp_path, read):
    path = tmp_path / "missing.json.gz"
    with pytest.raises(UserError) as refusal:
        read(path)
    assert str(refusal.value).startswith(f"{path}: cannot be read (")


CLAIMED, DENIED = {**CAT, "is_impossible": True}, {"answers": [], "is_impossible": False}


@pytest.mark.parametrize(
    ("version", "entry", "message"),
    [
        ("v2.0", CLAIMED, "question q2: 'is_impossible' is true, but it has an answer"),
        ("1.1", CLAIMED, "question q2: 'is_impossible' is true, but it has an answer"),
        ("v2.0", DENIED, "question q2: 'is_impossible' is false, but it has no answer; corr"),
        ("v2.0", {}, "question q2 has no 'answers', unlike others; in SQuAD 2.0, write an"),
        ("1.1", {"answers": []}, "question q2 has no answer, unlike SQuAD 1.1; leave it out, or"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_the_question(
    tmp_path, capsys, version, entry, message
):
    shown = refused(capsys, *write_score(tmp_path, (version, CAT, entry), {}))
    assert f"{tmp_path}/dev.json: " in shown
    assert message in shown


@pytest.mark.parametrize(
    ("version", "entry", "texts"),
    [
        ("v2.0", {"answers": []}, []),
        ("v2.0", {"is_impossible": True}, []),
        ("1.1", {**CAT, "is_impossible": False}, ["the cat"]),
        (None, {"answers": []}, []),
    ],
)
def test_whether_a_question_has_an_answer_need_not_be_said_twice(tmp_path, version, entry, texts):
    path = write_squad(tmp_path / "dev.json", {"a cat": [CAT, entry]}, version)
    assert [answer.text for answer in read_squad(path).questions[1].answers] == texts


def test_nothing_is_learnt_from_a_test_set(tmp_path):
    squad = read_squad(write_squad(tmp_path / "test.json", {"a cat": [{}, {}]}, "v2.0"))
    assert not squad.answered
    with pytest.raises(UserError, match=r"test.json: has no answers, so nothing can be learnt"):
        squad_windows.write_split(squad, None, tmp_path / "train")
