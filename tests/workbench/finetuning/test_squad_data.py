"""SQuAD's data: a token, window or target that points beside the text that it means."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.encoders import gpt2_bpe_utils

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
from tests.helpers.preprocess import write_bpe, write_pieces

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


def fairseqs_bpe(folder):
    return gpt2_bpe_utils.get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))


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
        ended = len(whole) + (whole.encode() != after)  # the last character may be cut
        piece = text[begun:ended]
        assert end == ended
        assert text[start:end] == (piece.lstrip() or piece)
        before = after
    assert before.decode() == text


@needs_files
def test_every_published_answer_is_found_in_tokens():
    squad = read_squad(PUBLISHED / "squad" / "dev-v1.1.json.gz")
    tokenizer, dictionary = read_bpe(PUBLISHED / "gpt2_bpe")
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


@pytest.mark.parametrize("seed", range(60))
def test_windows_hold_the_whole_context_and_each_token_has_one_best(seed):
    rng = random.Random(seed)
    limits = Limits(rng.randint(12, 40), rng.randint(1, 6), rng.randint(1, 5))
    question = np.arange(100, 100 + rng.randint(1, 9))
    context = np.arange(1000, 1000 + rng.choice([0, 1, rng.randint(2, 90)]))
    windows = make_windows(question, context, limits, SPECIAL)
    sizes = [len(window.has_max_context) for window in windows]
    asked = question[: limits.max_question].tolist()
    bos, eos = SPECIAL.bos(), SPECIAL.eos()
    for number, (window, size) in enumerate(zip(windows, sizes)):
        assert window.first == number * limits.stride
        part = context[window.first : window.first + size].tolist()
        assert window.tokens.tolist() == [bos, *asked, eos, eos, *part, eos]
        assert len(window.tokens) <= limits.max_length
        assert window.tokens[window.offset : window.offset + size].tolist() == part
    for place in range(len(context)):  # BERT's rule
        scores = {
            number: min(place - window.first, window.first + size - 1 - place) + 0.01 * size
            for number, (window, size) in enumerate(zip(windows, sizes))
            if window.first <= place < window.first + size
        }
        best = max(scores, key=scores.__getitem__)  # the first of equals
        for number in scores:
            window = windows[number]
            assert window.has_max_context[place - window.first] == (number == best)
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
    for text, start, found in (("two", 4, 4), ("two", 11, 12), ("one", -1, 0), ("three", 0, None)):
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
    squad = Squad(Path("x.json"), "2.0", questions)
    counts = write_split(squad, encoder, tmp_path / "train")
    assert (counts["questions"], counts["questions_left_out"], counts["questions_cut"]) == (8, 2, 1)
    assert (counts["questions_without_answer"], counts["unknown_tokens"]) == (1, 0)
    assert (counts["answers_moved"], counts["answers_in_no_window"]) == (1, 1)

    stored = data_utils.load_indexed_dataset(str(tmp_path / "train"), dictionary)
    spans = np.load(tmp_path / "train.spans.npy")
    assert len(stored) == len(spans) == counts["windows"]
    assert counts["tokens"] == sum(map(len, stored))
    found = Counter()
    for tokens, (start, end) in zip(stored, spans):
        assert len(tokens) <= 80
        if (start, end) != (0, 0):
            numbers = [int(dictionary[token]) for token in tokens[start : end + 1]]
            found[fairseqs_bpe(tmp_path).decode(numbers).strip()] += 1
    assert set(found) == {"w40 w41", "w7", "w8", "w0"}
    assert counts["windows_with_answer"] == sum(found.values())
