"""SQuAD's data: a token, window or target that points beside the text that it means."""

import random
import re
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.squad.databin import Limits, SquadDataBin
from fairseq_posenc.tokens.squad_file import Answer, Question, Squad, read_squad
from fairseq_posenc.tokens.squad_windows import (
    WindowMaker,
    locate_answer,
    make_windows,
    write_split,
)
from fairseq_posenc.tokens.subwords import GPT2, PieceEncoder, Pieces
from fairseq_posenc.workbench.finetuning.squad.score import exact
from tests.helpers.preprocess import DATA, fairseqs_bpe, write_bpe, write_pieces
from tests.helpers.products import WHOLE

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


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bpe":
        return read_bpe(write_bpe(folder, TEXTS))[0]
    of_bytes = {"byte_fallback": True, "character_coverage": 0.98}
    options = of_bytes if request.param == "byte_fallback" else {}
    lines = [text for text in TEXTS if text.strip()] * 20
    pieces = Pieces(write_pieces(folder, 330, lines, **options))
    return PieceEncoder(pieces, pieces.build_dictionary())


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_words_have_their_characters_and_no_others(tokenizer, text):
    tokens = tokenizer.tokens(text)
    words = [word.span() for word in re.finditer(r"\S+", text)]
    for (start, _), (_, end) in combinations_with_replacement(words, 2):
        first, last = tokens.covering(start, end)
        assert text[tokens.starts[first] : tokens.ends[last]] == text[start:end]
        needed = np.flatnonzero((tokens.ends > start) & (tokens.starts < end))
        assert [*range(first, last + 1)] == needed.tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_bytes_are_those_of_decoding(tmp_path, text):
    tokenizer, dictionary = read_bpe(write_bpe(tmp_path, TEXTS))
    ours, theirs = tokenizer.tokens(text), fairseqs_bpe(tmp_path)
    numbers = theirs.encode(text)
    assert ours.ids.tolist() == [dictionary.index(str(number)) for number in numbers]
    assert dictionary.unk() not in ours.ids
    before = b""
    for number, start, end in zip(numbers, ours.starts, ours.ends):
        after = before + bytes(theirs.byte_decoder[c] for c in theirs.decoder[number])
        begun = len(before.decode(errors="ignore"))
        whole = after.decode(errors="ignore")
        assert end == len(whole) + (whole.encode() != after)  # the last character may be cut
        piece = text[begun:end]
        assert text[start:end] == (piece.lstrip() or piece)
        before = after
    assert before.decode() == text


@pytest.mark.skipif(not DATA.is_dir(), reason="no published files")
def test_every_published_answer_is_found_in_tokens():
    squad = read_squad(DATA / "squad" / "dev-v1.1.json.gz")
    tokenizer, dictionary = read_bpe(DATA / "gpt2_bpe")
    encoder = WindowMaker(tokenizer, dictionary, Limits())
    same, matches = [], []
    for question in squad.questions[:: 9 if WHOLE else 90]:
        tokens = encoder.tokenize_context(question.context)
        assert dictionary.unk() not in tokens.ids
        for answer in question.answers:
            assert locate_answer(question.context, answer) == answer.start
            first, last = tokens.covering(answer.start, answer.start + len(answer.text))
            found = question.context[tokens.starts[first] : tokens.ends[last]]
            assert answer.text.strip() in found
            same.append(found == answer.text)
            matches.append(exact(answer.text, found))
    assert len(same) > (3_000 if WHOLE else 300)
    assert np.mean(same) > 0.985
    assert np.mean(matches) > 0.995  # what a perfect model could reach


@pytest.mark.parametrize("seed", range(60))
def test_windows_hold_the_whole_context_and_each_token_has_one_best(seed):
    rng = random.Random(seed)
    limits = Limits(rng.randint(12, 40), rng.randint(1, 6), rng.randint(1, 5))
    question = np.arange(100, 100 + rng.randint(1, 9))
    context = np.arange(1000, 1000 + rng.choice([0, 1, rng.randint(2, 90)]))
    windows = make_windows(question, context, limits, Dictionary())
    sizes = [len(window.has_max_context) for window in windows]
    asked = question[: limits.max_question].tolist()
    for number, (window, size) in enumerate(zip(windows, sizes)):
        assert window.first == number * limits.stride
        part = context[window.first : window.first + size].tolist()
        assert window.tokens.tolist() == [0, *asked, 2, 2, *part, 2]  # <s> is 0, </s> is 2
        assert len(window.tokens) <= limits.max_length
        assert window.offset == 1 + len(asked) + 2
    for place in range(len(context)):  # BERT's rule
        scores = {
            number: min(place - window.first, window.first + size - 1 - place) + 0.01 * size
            for number, (window, size) in enumerate(zip(windows, sizes))
            if window.first <= place < window.first + size
        }
        best = max(scores, key=scores.__getitem__)  # the first of equals
        marked = [n for n in scores if windows[n].has_max_context[place - windows[n].first]]
        assert marked == [best]
    if len(windows) > 1:  # the one before the last did not reach the end
        assert windows[-2].first + sizes[-2] < len(context)


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


def test_an_answer_at_another_place_is_found_nearest_by():
    context = "one two one two one"
    for text, start, found in (("two", 4, 4), ("two", 11, 12), ("one", -3, 0), ("three", 0, None)):
        assert locate_answer(context, Answer(text, start)) == found
    assert locate_answer(context, Answer("one", 12)) in (8, 16)


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
    tokenizer, dictionary = read_bpe(write_bpe(tmp_path, [context, *asked], merges=5))
    encoder = WindowMaker(tokenizer, dictionary, Limits(80, 20, 12))
    counts = write_split(Squad(Path("x.json"), "2.0", questions), encoder, tmp_path / "train")
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
