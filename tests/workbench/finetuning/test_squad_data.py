"""SQuAD's data: offsets into the context, windows, training data, the head, spans and answers."""

from __future__ import annotations

import json
import math
import random
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils
from fairseq.logging import metrics
from fairseq.models.roberta import RobertaModel
from tokenizers import ByteLevelBPETokenizer

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.tasks.squad.criterion import SquadCriterion
from fairseq_posenc.tasks.squad.databin import Limits, SquadDataBin
from fairseq_posenc.tokens.gpt2 import GPT2
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.squad_file import (
    Answer,
    Question,
    Squad,
    read_odds,
    read_predictions,
    read_squad,
)
from fairseq_posenc.tokens.squad_windows import (
    WindowMaker,
    locate_answer,
    make_windows,
    write_split,
)
from fairseq_posenc.tokens.tokenizer import TextTokens
from fairseq_posenc.workbench.finetuning.squad.predict import (
    MAX_ANSWER,
    NBEST,
    Guess,
    WindowSpans,
    combine_windows,
    find_best_spans,
)
from fairseq_posenc.workbench.finetuning.squad.score import exact
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.tiny_models import ARGS

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data"
needs_files = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published files")
TEXTS = [
    "  Zoë Müller was born in København (北京?) in 1912. ",
    "e\u0301t\u0301e 😀😀x\n\nthe\u00a0 ﬁsh ate ½ of ㎏, it's 3–4%\t!",
    "the cat sat on the mat, and the cat's mat was the best mat that there was",
    "",
    " ",
]
SPECIAL = Dictionary()  # <s>, <pad>, </s>, <unk>


# ------------------------------------------------------------------------ vocabularies, made here


def write_bpe(folder, texts, merges=120):
    """Learn a byte-level BPE; write the files of GPT-2 and of fairseq."""
    tokenizer = ByteLevelBPETokenizer()
    size = {"vocab_size": 256 + merges, "min_frequency": 1}
    tokenizer.train_from_iterator(texts, **size, show_progress=False)
    vocabulary, rules = map(Path, tokenizer.save_model(str(folder)))
    rules.rename(folder / "vocab.bpe")
    encoder = json.loads(vocabulary.rename(folder / "encoder.json").read_text(encoding="utf-8"))
    entries = "".join(f"{number} 1\n" for number in sorted(encoder.values()))
    (folder / "dict.txt").write_text(entries, encoding="utf-8")
    return folder


def write_pieces(folder, texts, **options):
    """Learn sentencepieces and write their model and dict.txt."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 20),
        model_prefix=str(folder / "sentencepiece"),
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    names = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    entries = "".join(f"{name} 1\n" for name in names)
    (folder / "dict.txt").write_text(entries, encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bpe":
        write_bpe(folder, TEXTS)
        dictionary = load_dictionary(folder / "dict.txt")
        return GPT2(folder / "encoder.json", folder / "vocab.bpe", dictionary)
    more = {"byte_fallback": True, "character_coverage": 0.98}
    options = more if request.param == "byte_fallback" else {}
    write_pieces(folder, [text for text in TEXTS if text.strip()], vocab_size=330, **options)
    dictionary = load_dictionary(folder / "dict.txt")
    return PieceEncoder(Pieces(folder / "sentencepiece.model"), dictionary)


# ------------------------------------------------------------------------------------------ offsets


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_of_the_text_is_found_again(tokenizer, text):
    tokens = tokenizer.tokens(text)
    assert all(np.diff(tokens.starts) >= 0)
    assert all(np.diff(tokens.ends) >= 0)
    places = [match.span() for match in re.finditer(r"\S+", text)]
    for start, _ in places:
        for _, end in places:
            if start < end:
                first, last = tokens.covering(start, end)
                found = text[tokens.starts[first] : tokens.ends[last]]
                assert text[start:end] in found
                # No token more than needed: without the first or the last, something is missing.
                assert tokens.ends[first] > start
                assert tokens.starts[last] < end
                assert first == 0 or tokens.ends[first - 1] <= start
                assert last + 1 == len(tokens.ids) or tokens.starts[last + 1] >= end


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_bytes_are_those_of_decoding(tmp_path, text):
    write_bpe(tmp_path, TEXTS)
    dictionary = load_dictionary(tmp_path / "dict.txt")
    files = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    ours = GPT2(*files, dictionary).tokens(text)
    theirs = gpt2_bpe_utils.get_encoder(*map(str, files))
    numbers = theirs.encode(text)
    assert ours.ids.tolist() == [dictionary.index(str(number)) for number in numbers]
    assert dictionary.unk() not in ours.ids
    before = b""
    for number, start, end in zip(numbers, ours.starts, ours.ends):
        after = before + bytes(theirs.byte_decoder[c] for c in theirs.decoder[number])
        begun = len(before.decode(errors="ignore"))
        whole = after.decode(errors="ignore")
        ended = len(whole) + (whole.encode() != after)  # the last character may be cut
        piece = text[begun:ended]
        assert end == ended
        assert text[start:end] == (piece.lstrip() or piece)
        before = after
    assert before.decode() == text


@needs_files
def test_every_published_answer_is_found_in_tokens():
    squad = read_squad(PUBLISHED / "squad" / "dev-v1.1.json.gz")
    folder = PUBLISHED / "gpt2_bpe"
    dictionary = load_dictionary(folder / "dict.txt")
    tokenizer = GPT2(folder / "encoder.json", folder / "vocab.bpe", dictionary)
    encoder = WindowMaker(tokenizer, dictionary, Limits())
    same = matches = answers = 0
    for question in squad.questions[::9]:
        tokens = encoder.tokenize_context(question.context)
        assert dictionary.unk() not in tokens.ids
        for answer in question.answers:
            assert locate_answer(question.context, answer) == answer.start
            first, last = tokens.covering(answer.start, answer.start + len(answer.text))
            found = question.context[tokens.starts[first] : tokens.ends[last]]
            assert answer.text.strip() in found
            answers += 1
            same += found == answer.text
            matches += exact(answer.text, found)
    assert answers > 3_000
    assert same / answers > 0.985
    assert matches / answers > 0.995  # what a perfect model could reach


# ------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("seed", range(60))
def test_windows_hold_the_whole_context_and_each_token_has_one_best(seed):
    rng = random.Random(seed)
    limits = Limits(rng.randint(12, 40), rng.randint(1, 6), rng.randint(1, 5))
    question = np.arange(100, 100 + rng.randint(1, 9))
    context = np.arange(1000, 1000 + rng.choice([0, 1, rng.randint(2, 90)]))
    windows = make_windows(question, context, limits, SPECIAL)
    asked = question[: limits.max_question].tolist()
    bos, eos = SPECIAL.bos(), SPECIAL.eos()
    seen, best = [], []
    for number, window in enumerate(windows):
        size = len(window.has_max_context)
        part = context[window.first : window.first + size].tolist()
        assert window.tokens.tolist() == [bos, *asked, eos, eos, *part, eos]
        assert len(window.tokens) <= limits.max_length
        assert window.tokens[window.offset : window.offset + size].tolist() == part
        assert window.first == number * limits.stride
        seen += part
        best += [token for token, is_best in zip(part, window.has_max_context) if is_best]
        for place in range(size):
            shown = [
                min(
                    place + window.first - w.first,
                    w.first + len(w.has_max_context) - 1 - place - window.first,
                )
                + 0.01 * len(w.has_max_context)
                for w in windows
                if w.first <= place + window.first < w.first + len(w.has_max_context)
            ]
            mine = min(place, size - 1 - place) + 0.01 * size
            assert window.has_max_context[place] <= (mine == max(shown))
    assert set(seen) == set(context.tolist())
    assert sorted(best) == context.tolist()
    if len(windows) > 1:  # the one before the last did not reach the end
        assert windows[-2].first + len(windows[-2].has_max_context) < len(context)


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


# ------------------------------------------------------------------------------------ training data


def test_an_answer_at_another_place_is_found_nearest_by():
    context = "one two one two one"
    assert locate_answer(context, Answer("two", 4)) == 4
    assert locate_answer(context, Answer("two", 11)) == 12
    assert locate_answer(context, Answer("one", 12)) in (8, 16)
    assert locate_answer(context, Answer("one", -1)) == 0
    assert locate_answer(context, Answer("three", 0)) is None


def test_targets_point_at_the_answer_and_what_is_lost_is_counted(tmp_path):
    context = " ".join(f"w{number}" for number in range(60))
    questions = [
        Question("found", "which word", context, (Answer("w40 w41", context.index("w40")),)),
        Question("moved", "which word", context, (Answer("w7", 0),)),
        Question("second", "which word", context, (Answer("w99", 0), Answer("w8", 24))),
        Question("lost", "which word", context, (Answer("w99", 0),)),
        Question("blank", "which word", context, (Answer("", 5), Answer(" ", 2))),
        Question("none", "which word", context, ()),
        Question("wide", "which word", context, (Answer(context, 0),)),
        Question("cut", "which word " * 20, context, (Answer("w0", 0),)),
    ]
    write_bpe(tmp_path, [context, "which word"], merges=5)
    dictionary = load_dictionary(tmp_path / "dict.txt")
    tokenizer = GPT2(tmp_path / "encoder.json", tmp_path / "vocab.bpe", dictionary)
    encoder = WindowMaker(tokenizer, dictionary, Limits(80, 20, 12))
    squad = Squad(Path("x.json"), "2.0", questions)
    counts = write_split(squad, encoder, tmp_path / "train")
    assert (counts["questions"], counts["questions_left_out"], counts["questions_cut"]) == (8, 2, 1)
    assert (counts["questions_without_answer"], counts["unknown_tokens"]) == (1, 0)
    assert (counts["answers_moved"], counts["answers_in_no_window"]) == (1, 1)

    from fairseq.data import data_utils

    stored = data_utils.load_indexed_dataset(str(tmp_path / "train"), dictionary)
    spans = np.load(tmp_path / "train.spans.npy")
    assert len(stored) == len(spans) == counts["windows"]
    assert counts["tokens"] == sum(map(len, stored))
    bpe = gpt2_bpe_utils.get_encoder(str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe"))
    found = Counter()
    for tokens, (start, end) in zip(stored, spans):
        assert len(tokens) <= 80
        if (start, end) != (0, 0):
            numbers = [int(dictionary[token]) for token in tokens[start : end + 1]]
            found[bpe.decode(numbers).strip()] += 1
    assert set(found) == {"w40 w41", "w7", "w8", "w0"}
    assert counts["windows_with_answer"] == sum(found.values())


def test_files_without_answers_teach_nothing(tmp_path):
    squad = Squad(Path("test.json"), "2.0", [Question("q", "?", "c", None)])
    with pytest.raises(UserError, match=r"test.json: has no answers"):
        write_split(squad, None, tmp_path / "train")


# ------------------------------------------------------------------------------- head and criterion


def model_of(spec="learned+m4m", **more):
    dictionary = Dictionary()
    for index in range(20):
        dictionary.add_symbol(f"w{index}")
    names = {"position_encoding": spec, "dropout": 0.0, "attention_dropout": 0.0, **more}
    args = Namespace(**ARGS["masked_lm"], **names)
    task = SimpleNamespace(source_dictionary=dictionary)
    torch.manual_seed(0)
    return PositionalRoberta.build_model(args, task).eval()


TOKENS = torch.tensor([[0, 5, 6, 2, 2, 7, 8, 9, 2], [0, 9, 2, 2, 6, 2, 1, 1, 1]])


def test_scores_are_those_of_a_linear_layer_without_padding_in_float32():
    model = model_of()
    model.register_span_head()
    features, _ = model(TOKENS, features_only=True)
    layer = model.span_head.scores
    expected = (features @ layer.weight.T + layer.bias).unbind(-1)
    for ours, theirs in zip(model(TOKENS, span_scores=True), expected):
        torch.testing.assert_close(ours[TOKENS != 1], theirs[TOKENS != 1])
        assert ours[TOKENS == 1].tolist() == [-math.inf] * 3
    halved = model.to(torch.bfloat16)(TOKENS, span_scores=True)
    assert {scores.dtype for scores in halved} == {torch.float32}


def test_a_head_starts_fresh_on_a_pretrained_model_and_is_kept_on_a_fine_tuned_one():
    pretrained, model = model_of(), model_of()
    model.register_span_head()
    state = pretrained.state_dict()
    before = model.span_head.scores.weight.clone()
    model.load_state_dict(dict(state), strict=True)
    assert torch.equal(model.span_head.scores.weight, before)
    tuned = {k: v if is_identity(k) else v + 1 for k, v in model.state_dict().items()}
    again = model_of()
    again.register_span_head()
    again.load_state_dict(dict(tuned), strict=True)
    assert torch.equal(again.span_head.scores.weight, before + 1)
    pretrained.load_state_dict(dict(tuned), strict=True)  # the head is left out
    assert "span_head.scores.weight" not in pretrained.state_dict()


def sample(starts, ends, rows=slice(None)):
    tokens = TOKENS[rows]
    return {
        "net_input": {"src_tokens": tokens, "src_lengths": (tokens != 1).sum(1)},
        "starts": torch.tensor(starts)[rows],
        "ends": torch.tensor(ends)[rows],
        "ntokens": int((tokens != 1).sum()),
    }


def test_the_loss_is_the_cross_entropy_of_both_ends_and_ranks_add_up():
    model = model_of()
    model.register_span_head()
    criterion = SquadCriterion(SimpleNamespace())
    starts, ends = [5, 0], [6, 4]
    loss, size, logged = criterion(model, sample(starts, ends))
    expected = 0.0
    for scores, targets in zip(model(TOKENS, span_scores=True), (starts, ends)):
        for row, target in zip(scores, targets):
            expected -= float(row.detach().double().softmax(0)[target].log()) / 2
    assert (float(loss), size) == (pytest.approx(expected, rel=1e-5), 2)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.span_head.scores.weight.grad.abs().sum() > 0

    halves = [criterion(model, sample(starts, ends, slice(i, i + 1)))[2] for i in (0, 1)]
    summed = {key: sum(half[key] for half in halves) for key in logged}
    found = []
    for outputs in ([logged], halves, [summed]):
        with metrics.aggregate(new_root=True) as meters:
            SquadCriterion.reduce_metrics(outputs)
        found.append(meters.get_smoothed_values())
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(found[2])
    assert found[0]["loss"] == pytest.approx(expected / 2 / math.log(2), abs=1e-3)
    best = [scores.argmax(-1).tolist() for scores in model(TOKENS, span_scores=True)]
    right = sum(guess == target for guess, target in zip(best[0], starts))
    assert found[0]["start_accuracy"] == pytest.approx(100 * right / 2)


# -------------------------------------------------------------------------------- spans and answers


@pytest.mark.parametrize("seed", range(30))
def test_best_spans_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    context = np.arange(rng.integers(1, 90))
    windows = make_windows(np.arange(3), context, Limits(50, 17, 3), SPECIAL)
    for window in windows:
        start, end = rng.normal(size=(2, len(window.tokens)))
        sums = {}
        for first in range(len(window.has_max_context)):
            for last in range(first, min(first + MAX_ANSWER, len(window.has_max_context))):
                if window.has_max_context[first]:
                    at = window.offset
                    sums[window.first + first, window.first + last] = (
                        start[at + first] + end[at + last]
                    )
        expected = sorted(sums.items(), key=lambda item: -item[1])[:NBEST]
        found = find_best_spans(window, start, end)
        assert [(first, last) for first, last, _ in found.spans] == [key for key, _ in expected]
        assert [score for *_, score in found.spans] == [value for _, value in expected]
        assert found.null == start[0] + end[0]


def test_windows_together_give_the_best_text_and_the_surest_that_there_is_one():
    context = "  the cat, the\n cat "
    spans = [(2, 5), (6, 9), (9, 10), (11, 14), (14, 15), (16, 19)]
    tokens = TextTokens(np.arange(6), *(np.array(each) for each in zip(*spans)))
    scored = [
        WindowSpans([Guess(0, 1, 5.0), Guess(1, 1, 3.0)], null=2.0),
        WindowSpans([Guess(3, 5, 6.0), Guess(5, 5, 4.0), Guess(4, 4, 9.0)], null=7.0),
    ]
    found = combine_windows("q", context, tokens, scored)
    assert found == ("q", "the\n cat", 2.0 - 6.0)  # the span with 9.0 has no text
    assert combine_windows("q", "", tokens, [WindowSpans([], null=1.0)]) == ("q", "", 0.0)


# ------------------------------------------------------------------------------- pre-trained models


def save(path, model, args, data="nowhere"):
    """Write a checkpoint as older fairseqs did, with which RoBERTa was released."""
    state = {
        "args": Namespace(**{**vars(args), "task": "masked_lm", "data": data}),
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 1, "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    torch.save(state, path)
    return path


def rebuilt(pretrained):
    options = {**pretrained.roberta_section, "dropout": 0.0, "attention_dropout": 0.0}
    dictionary = Dictionary()
    for index in range(pretrained.dictionary.size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    task = SimpleNamespace(source_dictionary=dictionary)
    model = PositionalRoberta.build_model(Namespace(**options), task).eval()
    state = torch.load(pretrained.path)["model"]
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("spec", ["learned+m4m(max_distance=5)", "rope", "none"])
def test_a_model_is_built_again_from_its_checkpoint(tmp_path, spec):
    more = {"arch": "roberta_none_tiny", "attention_directions": "lr,rl"}
    model = model_of(spec, **more)
    pretrained = read_pretrained(save(tmp_path / "model.pt", model, model.args))
    assert (str(pretrained.spec), pretrained.dictionary.size) == (spec, 24)
    assert pretrained.directions == pretrained.roberta_section["attention_directions"] == "lr,rl"
    torch.testing.assert_close(rebuilt(pretrained)(TOKENS), model(TOKENS))


STOCK_POSITIONS = [
    ({}, "learned"),
    ({"encoder_learned_pos": False}, "sinusoidal(layout=fairseq)"),
    ({"no_token_positional_embeddings": True}, "none"),
]


@pytest.mark.parametrize(("options", "spec"), STOCK_POSITIONS)
def test_a_roberta_of_fairseq_is_built_again_with_its_positions(tmp_path, options, spec):
    args = Namespace(**ARGS["masked_lm"], arch="roberta", dropout=0.0, attention_dropout=0.0)
    args = Namespace(**vars(args), **options)
    theirs = model_of()
    task = SimpleNamespace(source_dictionary=theirs.encoder.dictionary)
    model = RobertaModel.build_model(args, task).eval()
    pretrained = read_pretrained(save(tmp_path / "model.pt", model, args))
    assert str(pretrained.spec) == pretrained.roberta_section["position_encoding"] == spec
    assert pretrained.max_positions == 24
    torch.testing.assert_close(rebuilt(pretrained)(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.parametrize("text", ["[" * 200_000 + "]" * 200_000, "\udcff"], ids=["deep", "bytes"])
def test_json_that_python_refuses_is_one_line_that_names_the_file(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for read in (read_squad, read_predictions, read_odds):
        with pytest.raises(UserError, match=f"{path}: cannot be read"):
            read(path)
