"""Tokenizers of exported folders give the numbers that fairseq's dictionary gives.

No other tests compare texts: a space, a merge or a number that differs is found nowhere else.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from binarize import formats
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert import tokenizer as module
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint, data_bin, export_to, refuse_export
from tests.helpers.preprocess import binarize, write_bpe, write_pieces

SYLLABLES = ["ba", "ré", "ti", "nou", "ß", "ka", "lo", "1", "2", ",", "ment"]


def sentences(count=60, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(80)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


SPACED = [line.replace(" ", "  ") for line in sentences(20)]


def joined(lines):
    return [" ".join(line.split()) for line in lines]


def train_pieces(kind, **flags):
    """Train a sentencepiece model; return its file and the model."""
    options = {"model_type": kind, "vocab_size": 90 if kind == "bpe" else 50, **flags}
    lines = [*sentences(), *SPACED]
    path = write_pieces(new_directory(), options.pop("vocab_size"), lines, **options)
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


def as_sentencepiece(kind, **flags):
    path, processor = train_pieces(kind, **flags)
    given = joined if flags.get("remove_extra_whitespaces", True) else list

    def cut(lines):
        found = processor.encode(given(lines))
        return [[processor.id_to_piece(number) for number in line] for line in found]

    return path, cut, lambda lines: processor.decode(processor.encode(lines))


def as_gpt2():
    """Cut texts as fairseq does; a dictionary has the numbers of pieces."""
    folder = write_bpe(new_directory(), sentences(), merges=6)
    encoder = gpt2_bpe_utils.get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))

    def cut(lines):
        return [[str(number) for number in encoder.encode(line)] for line in lines]

    return folder, cut, list


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
CASES = [
    *(partial(as_sentencepiece, kind, **flags) for kind in ("bpe", "unigram") for flags in FLAGS),
    *(as_gpt2, partial(as_characters, ""), partial(as_characters, "▁")),
    lambda: ("words", lambda lines: [line.split() for line in lines], joined),
]


@pytest.mark.parametrize("make", CASES)
def test_numbers_are_those_of_the_dictionary_and_are_decoded(make):
    """Also where it lacks pieces; decoded where it has all."""
    tokenization, cut, decode = make()
    text = [*sentences(), *SPACED]
    lines = [*text, "ba  ré\tti", " ba  ré ", "½ ① ﬁn x", "ba" * 20, "𝔸 it's 12", "日本", ""]
    for known in (sentences(20), text):
        dictionary = Dictionary()
        for symbol in itertools.chain(*cut(known)):
            dictionary.add_symbol(symbol)
        dictionary.add_symbol("<mask>")
        dictionary.finalize()
        tokenizer = module.build_tokenizer(tokenization, dictionary)
        found = tokenizer.encode_batch(lines, add_special_tokens=False)
        size = len(dictionary)  # later numbers are unknown to a model
        read = [[i if i < size else dictionary.unk() for i in each.ids] for each in found]
        assert read == [[dictionary.index(symbol) for symbol in line] for line in cut(lines)]
    ids = [each.ids for each in tokenizer.encode_batch(text, add_special_tokens=False)]
    assert tokenizer.decode_batch(ids) == decode(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"treat_whitespace_as_suffix": True}, "spaces at the ends"),
        ({"user_defined_symbols": ["<x>"]}, "user-defined symbols"),
        ({"byte_fallback": True, "vocab_size": 400}, "single bytes"),
    ],
)
def test_sentencepiece_models_that_no_tokenizer_copies_are_refused(flags, message):
    path, _ = train_pieces("bpe", **flags)
    with pytest.raises(UserError, match=message):
        module.build_tokenizer(path, Dictionary())


def test_a_tokenizer_loads_with_its_special_symbols():
    folder, cut, _ = as_gpt2()
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", [*map(str, range(262))]))
    out = export_to(trained, tokens=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(out)
    dictionary = trained.task.source_dictionary
    for line in ["ba tiba", "1 é", "日本"]:
        text = " ".join(["<s>", *cut([line])[0]])
        expected = dictionary.encode_line(text, append_eos=True, add_if_not_exist=False).tolist()
        assert tokenizer(line)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == line
    mask = dictionary.index("<mask>")
    for name, index in zip(("bos", "pad", "eos", "unk", "cls", "sep", "mask"), (0, 1, 2, 3, 0, 2)):
        assert getattr(tokenizer, f"{name}_token_id") == index
    assert tokenizer.mask_token_id == mask
    before, after = cut(["ba", " 1"])
    symbols = " ".join(["<s>", *before, "<mask>", *after])
    masked = dictionary.encode_line(symbols, add_if_not_exist=False)
    scores = trained.model(masked[None].long())[0][0, masked.tolist().index(mask)]
    model = AutoModelForMaskedLM.from_pretrained(out)
    filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)("ba <mask> 1")
    assert [answer["token"] for answer in filled] == scores.topk(5).indices.tolist()


def test_two_sentencepiece_models_of_one_dictionary_are_two_tokenizers():
    models = [train_pieces("unigram", vocab_size=size) for size in (40, 50)]
    processors = [processor for _, processor in models]
    pieces = [each.id_to_piece(n) for each in processors for n in range(3, len(each))]
    data = data_bin("translation", list(dict.fromkeys(pieces)))
    for language, (path, _) in zip(("de", "en"), models):
        (data / f"sentencepiece.{language}.model").write_bytes(path.read_bytes())
    out = export_to(checkpoint("translation", "none", data), tokens=str(data))
    for folder, processor in zip((out, out / "target"), processors):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        found = [tokenizer.encode(line, add_special_tokens=False).tokens for line in sentences()]
        assert found == processor.encode(sentences(), out_type=str)


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        (["1", "2", "3"], "lacks 259 pieces of the tokenizer"),
        ([*map(str, range(262)), "!"], "dict.txt: has pieces of the tokenizer twice (1): --tokens"),
    ],
)
def test_a_dictionary_of_other_pieces_is_refused(symbols, message, capsys):
    """Pieces are there by their numbers in GPT-2's file; one is so by its name as well."""
    folder, _, _ = as_gpt2()
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", symbols))
    assert message in refuse_export(capsys, trained, "--tokens", folder)
    export_to(trained, tokens="none")


def test_a_data_folder_says_what_cut_its_text(tmp_path):
    with pytest.raises(UserError, match="say with --tokens"):
        module.find_tokenization(None, tmp_path, "")
    (tmp_path / "text").write_text("one two\n")
    for way, words in (("words", ["--words"]), ("characters", [])):
        made = tmp_path / way
        given = ["--train", tmp_path / "text", "--out", made, *words]
        binarize(formats.plain, *given, characters=not words)
        assert module.find_tokenization(None, made, "") == way
    (tmp_path / "sentencepiece.de.model").touch()
    assert module.find_tokenization(None, tmp_path, "de").name == "sentencepiece.de.model"
    assert module.find_tokenization("words", tmp_path, "de") == "words"
