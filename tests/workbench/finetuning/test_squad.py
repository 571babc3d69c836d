"""SQuAD but for training: a token, window, loss or best answer unlike its definition."""

import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary, data_utils
from fairseq.logging import metrics

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.tasks.squad.criterion import SquadCriterion
from fairseq_posenc.tasks.squad.databin import Limits, SquadDataBin
from fairseq_posenc.tokens import squad_windows
from fairseq_posenc.tokens.squad_file import Answer, Question, Squad, read_squad
from fairseq_posenc.tokens.subwords import GPT2
from fairseq_posenc.tokens.tokenizer import TextTokens
from fairseq_posenc.workbench.finetuning.squad import predict, score
from tests.helpers.preprocess import DATA, fairseqs_bpe, published, write_bpe
from tests.helpers.products import WHOLE
from tests.helpers.tiny_models import make_model


def read_bpe(folder):
    dictionary = load_dictionary(folder / "dict.txt")
    return GPT2(folder / "encoder.json", folder / "vocab.bpe", dictionary), dictionary


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
    begins = [0]
    while begins[-1] + room < len(context):  # as BERT, until a part reaches the end
        begins.append(begins[-1] + stride)
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
        assert (window.context_start, window.offset) == (begin, 1 + len(asked) + 2)
        assert window.has_max_context.tolist() == [find_best(token) == begin for token in part]


def test_the_smallest_limits_and_those_advised_are_accepted():
    Limits(40, 6, 30).check()
    Limits(6, 1, 1).check()
    with pytest.raises(UserError) as short:
        SquadDataBin(Path("bin"), "1.1", Limits(), 1).check_lengths(64, "a model")
    Limits(*map(int, re.findall(r"--\S+ (\d+)", str(short.value)))).check()


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
    squad = Squad(Path("x.json"), "2.0", questions)
    counts = squad_windows.write_split(squad, maker, tmp_path / "train")
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
    test_set = squad._replace(questions=[questions[0]._replace(answers=None)])
    with pytest.raises(UserError, match=r"x.json: has no answers, so nothing can be learned"):
        squad_windows.write_split(test_set, maker, tmp_path / "none")
    lost = squad._replace(questions=[x for x in questions if x.id in ("lost", "blank")])
    with pytest.raises(UserError, match=r"^x.json: no paragraph has its answers"):
        squad_windows.write_split(lost, maker, tmp_path / "lost")


ROWS = [0, 5, 6, 2, 2, 7, 8, 9, 2], [0, 9, 2, 2, 6, 2, 1, 1, 1], [0, 9, 9, 2, 1, 1, 1, 1, 1]
TOKENS = torch.tensor(ROWS)


def with_head():
    model = make_model("masked_lm", position_encoding="learned+m4m")
    model.register_span_head()
    return model


def test_scores_are_those_of_a_linear_layer_without_padding_in_float32():
    model = with_head()
    features, _ = model(TOKENS, features_only=True)
    expected = F.linear(features, *model.span_head.scores.parameters()).unbind(-1)
    for ours, theirs in zip(model(TOKENS, span_scores=True), expected):
        torch.testing.assert_close(ours, theirs.masked_fill(TOKENS == 1, -math.inf))
    with pytest.raises(TypeError, match="features_only"):  # no argument is dropped
        model(TOKENS, False, span_scores=True)
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
    targets = {"starts": torch.tensor([1, 0, 1]), "ends": torch.tensor([6, 4, 2])}

    def compute(rows):
        tokens = TOKENS[rows]
        numbers = {"net_input": {"src_tokens": tokens}, "ntokens": int((tokens != 1).sum())}
        return criterion(model, numbers | {name: x[rows] for name, x in targets.items()})

    (loss, size, logged), *halves = [compute(rows) for rows in ([0, 1, 2], [0, 2], [1])]
    pairs = [*zip(model(TOKENS, span_scores=True), targets.values())]
    expected = sum(F.cross_entropy(*x, reduction="sum").item() for x in pairs) / 2
    assert (float(loss.detach()), size) == (pytest.approx(expected, rel=1e-5), 3)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.span_head.scores.weight.grad.abs().sum() > 0
    ranks = [half[2] for half in halves]
    summed = {key: sum(rank[key] for rank in ranks) for key in logged}
    means = {"loss": pytest.approx(expected / 3 / math.log(2), abs=1e-3)}
    for side, (scores, right) in zip(("start", "end"), pairs):
        share = (scores.argmax(-1) == right).double().mean().item()
        means[f"{side}_accuracy"] = round(100 * share, 1)
    for outputs in ([logged], ranks, [summed]):
        with metrics.aggregate(new_root=True) as meters:
            SquadCriterion.reduce_metrics(outputs)
        assert meters.get_smoothed_values() == means


@pytest.mark.parametrize("seed", range(30))
def test_best_spans_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    context = np.arange(rng.integers(1, 90))
    limits = Limits(50, 17, 3)
    for window in squad_windows.make_windows(np.arange(3), context, limits, Dictionary()):
        start, end = rng.normal(size=(2, len(window.tokens)))
        size, at, begin = len(window.has_max_context), window.offset, window.context_start
        sums = {
            (begin + first, begin + last): start[at + first] + end[at + last]
            for first in range(size)
            for last in range(first, min(first + predict.MAX_ANSWER, size))
            if window.has_max_context[first]
        }
        expected = sorted(sums.items(), key=lambda item: -item[1])[: predict.NBEST]
        found = predict.find_best_spans(window, start, end)
        assert [((first, last), score) for first, last, score in found.spans] == expected
        assert found.null_score == start[0] + end[0]
        end[rng.integers(len(end))] = np.nan  # one is enough: no span of the window counts
        assert np.isnan(predict.find_best_spans(window, start, end).null_score)


def test_windows_together_give_the_best_text_and_the_surest_that_there_is_one():
    context = "  the cat, the\n cat "
    spans = [(2, 5), (6, 9), (9, 10), (11, 14), (14, 15), (16, 19)]
    tokens = TextTokens(np.arange(6), *(np.array(side) for side in zip(*spans)))
    first = [predict.Span(0, 1, 5.0), predict.Span(1, 1, 3.0)]
    second = [predict.Span(3, 5, 6.0), predict.Span(5, 5, 4.0), predict.Span(4, 4, 9.0)]
    scored = [predict.WindowSpans(first, 2.0), predict.WindowSpans(second, 7.0)]
    found = predict.combine_windows("q", context, tokens, scored)
    assert found == ("q", "the\n cat", 2.0 - 6.0)  # the span with 9.0 has no text
    empty = predict.WindowSpans([], 1.0)
    assert predict.combine_windows("q", "", tokens, [empty]) == ("q", "", 0.0)
    with pytest.raises(UserError, match="question q: the model's scores are NaN or infinite"):
        predict.combine_windows("q", "", tokens, [empty, empty._replace(null_score=np.nan)])
    assert predict.Predictor(with_head(), None, "learned").predict([], max_tokens=64) == []
