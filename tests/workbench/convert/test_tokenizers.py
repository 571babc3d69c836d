"""Tokenizers of exported folders give the numbers that fairseq's dictionary gives.

No other tests compare texts: a space, a merge or a number that differs is found nowhere else.
"""

import random
from functools import partial
from itertools import chain
from typing import Any

import pytest
import sentencepiece
import torch
from fairseq.data import Dictionary
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from binarize import formats
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.tokenizer import build_tokenizer, find_tokenization
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint, data_bin, export_to, refuse_export
from tests.helpers.preprocess import binarize, fairseqs_bpe, write_bpe, write_pieces

SYLLABLES = ["ba", "ré", "ti", "nou", "ß", "ka", "lo", "1", "2", ",", "ment"]


def sentences(count=60):
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(80)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


TEXT = [*sentences(), *(line.replace(" ", "  ") for line in sentences(20))]
HOSTILE = ["ba  ré\tti", " ba  ré ", "½ ① ﬁn x", "ba" * 20, "𝔸 it's 12", "日本", ""]


def joined(lines):
    return [" ".join(line.split()) for line in lines]


def train_pieces(kind, size=50, **flags):
    """Train a sentencepiece model; return its file and the model."""
    path = write_pieces(new_directory(), size, TEXT, model_type=kind, **flags)
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


# Of each tokenization: its name or files, how fairseq cuts lines, and what it decodes them to.
def as_sentencepiece(kind, size, **flags):
    path, processor = train_pieces(kind, size, **flags)
    given = joined if flags.get("remove_extra_whitespaces", True) else list

    def cut(lines):
        found = processor.encode(given(lines))
        return [[processor.id_to_piece(number) for number in line] for line in found]

    return path, cut, lambda lines: processor.decode(processor.encode(lines))


def as_gpt2():
    """A dictionary has the numbers of pieces."""
    folder = write_bpe(new_directory(), sentences(), merges=6)
    encode = fairseqs_bpe(folder).encode
    return folder, lambda lines: [[*map(str, encode(line))] for line in lines], list


def as_characters(space):
    def cut(lines):
        return [space.join(line.split()) for line in lines]

    return "characters", cut, lambda lines: [x.replace("▁", " ") for x in cut(lines)]


FLAGS: list[dict[str, Any]] = [
    *({"normalization_rule_name": rule} for rule in ("identity", "nmt_nfkc")),
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": False},
    {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
    {"split_by_whitespace": False},
]
TOKENIZATIONS = {
    **{f"bpe-{flags}": partial(as_sentencepiece, "bpe", 90, **flags) for flags in FLAGS},
    **{f"unigram-{flags}": partial(as_sentencepiece, "unigram", 50, **flags) for flags in FLAGS},
    **{"gpt2": as_gpt2, "characters": partial(as_characters, "")},
    "words": lambda: ("words", lambda lines: [line.split() for line in lines], joined),
    "characters and spaces": partial(as_characters, "▁"),
}


@pytest.mark.parametrize("name", TOKENIZATIONS)
def test_numbers_are_those_of_the_dictionary_and_are_decoded(name):
    """Also where it lacks pieces; decoded where it has all."""
    tokenization, cut, decode = TOKENIZATIONS[name]()
    lines = [*TEXT, *HOSTILE]
    for known in (sentences(20), TEXT):
        dictionary = Dictionary()
        for symbol in chain(*cut(known), ["<mask>"]):
            dictionary.add_symbol(symbol)
        dictionary.finalize()
        tokenizer = build_tokenizer(tokenization, dictionary)
        found = tokenizer.encode_batch(lines, add_special_tokens=False)
        size = len(dictionary)  # later numbers are unknown to a model
        read = [[i if i < size else dictionary.unk() for i in each.ids] for each in found]
        assert read == [[dictionary.index(symbol) for symbol in line] for line in cut(lines)]
    ids = [each.ids for each in tokenizer.encode_batch(TEXT, add_special_tokens=False)]
    assert tokenizer.decode_batch(ids) == decode(TEXT)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"treat_whitespace_as_suffix": True}, "spaces at the ends"),
        ({"user_defined_symbols": ["<x>"]}, "user-defined symbols"),
        ({"byte_fallback": True, "size": 400}, "single bytes"),
    ],
)
def test_sentencepiece_models_that_no_tokenizer_copies_are_refused(flags, message):
    path, _ = train_pieces("bpe", **flags)
    with pytest.raises(UserError, match=message):
        build_tokenizer(path, Dictionary())


def test_a_tokenizer_loads_with_its_special_symbols():
    folder, cut, _ = as_gpt2()
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", [*map(str, range(262))]))
    out = export_to(trained, "--tokens", folder)
    tokenizer, dictionary = AutoTokenizer.from_pretrained(out), trained.task.source_dictionary
    for line in ["ba tiba", "1 é", "日本"]:
        expected = [0, *map(dictionary.index, *cut([line])), 2]
        assert tokenizer(line)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == line
    mask = dictionary.index("<mask>")
    special = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "cls": 0, "sep": 2, "mask": mask}
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in special} == special
    before, after = ([*map(dictionary.index, part)] for part in cut(["ba", " 1"]))
    masked = torch.tensor([[0, *before, mask, *after, 2]])
    scores = trained.model(masked)[0][0, len(before) + 1]
    model = AutoModelForMaskedLM.from_pretrained(out)
    filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)("ba <mask> 1")
    assert [answer["token"] for answer in filled] == scores.topk(5).indices.tolist()


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        (["1", "2", "3"], "lacks 259 pieces of the tokenizer"),
        ([*map(str, range(262)), "!"], "dict.txt: has pieces of the tokenizer twice (1): --tokens"),
    ],
)
def test_a_dictionary_of_other_pieces_is_refused(symbols, message, capsys):
    """Pieces are there by their numbers in GPT-2's file; one is so by its name as well."""
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", symbols))
    assert message in refuse_export(capsys, trained, "--tokens", as_gpt2()[0])
    export_to(trained, "--tokens", "none")


def test_a_data_folder_says_what_cut_its_text(tmp_path):
    with pytest.raises(UserError, match="name the tokenizer with --tokens"):
        find_tokenization(None, tmp_path, "")
    (tmp_path / "text").write_text("one two\n")
    for way, words in (("words", ["--words"]), ("characters", [])):
        given = ["--train", tmp_path / "text", "--out", tmp_path / way, *words]
        binarize(formats.plain, *given, characters=not words)
        assert find_tokenization(None, tmp_path / way, "") == way
    (tmp_path / "sentencepiece.de.model").touch()
    assert find_tokenization(None, tmp_path, "de").name == "sentencepiece.de.model"
    assert find_tokenization("words", tmp_path, "de") == "words"
