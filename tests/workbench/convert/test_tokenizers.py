"""Tokenizers of exported folders give the numbers that fairseq's dictionary gives."""

from __future__ import annotations

import json
import random

import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from binarize import command, formats, options
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.convert import tokenizer as module
from fairseq_posenc.workbench.running.options import Parser
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint, data_bin, export_to
from tests.helpers.preprocess import write_bpe, write_pieces

SYLLABLES = ["ba", "ré", "ti", "nou", "ß", "ka", "lo", "1", "2", ",", "ment"]


def sentences(count=60, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(80)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


def counted(lines):
    dictionary = Dictionary()
    for line in lines:
        for symbol in line:
            dictionary.add_symbol(symbol)
    dictionary.finalize()
    return dictionary


def numbers(dictionary, lines):
    return [[dictionary.index(symbol) for symbol in line] for line in lines]


def as_read(tokenizer, dictionary, lines):
    """Return a tokenizer's numbers as a model reads them."""
    found = tokenizer.encode_batch(lines, add_special_tokens=False)
    size = len(dictionary)
    return [[i if i < size else dictionary.unk() for i in each.ids] for each in found]


def train_pieces(kind, lines, **flags):
    """Train a sentencepiece model; return its file and the model."""
    options = {"model_type": kind, "vocab_size": 90 if kind == "bpe" else 50, **flags}
    path = write_pieces(new_directory(), options.pop("vocab_size"), lines, **options)
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_sentencepieces(kind, rule):
    path, processor = train_pieces(kind, sentences(), normalization_rule_name=rule)

    def pieces(lines):
        found = processor.encode([" ".join(line.split()) for line in lines])
        return [[processor.id_to_piece(number) for number in line] for line in found]

    dictionary = counted(pieces(sentences()[:30]))  # which lacks pieces
    tokenizer = module.build_tokenizer(path, dictionary)
    lines = [*sentences(seed=0), "ba  ré\tti", "½ ① ﬁn x", "ba" * 20]
    assert tokenizer.get_vocab_size() > len(dictionary)
    assert as_read(tokenizer, dictionary, lines) == numbers(dictionary, pieces(lines))
    plain = [line for line in sentences() if "½" not in line]
    decoded = [tokenizer.decode(tokenizer.encode(line).ids) for line in plain]
    assert decoded == plain


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "flags",
    [
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
        {"split_by_whitespace": False},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_flags_of_a_sentencepiece_model_are_copied(kind, flags):
    spaced = [line.replace(" ", "  ") for line in sentences(20)]
    path, processor = train_pieces(kind, [*sentences(), *spaced], **flags)
    dictionary = counted(processor.encode(sentences(), out_type=str))
    tokenizer = module.build_tokenizer(path, dictionary)
    lines = [*sentences(), *spaced, " ba  ré ", "ti", ""]
    pieces = processor.encode(lines, out_type=str)
    assert as_read(tokenizer, dictionary, lines) == numbers(dictionary, pieces)
    ids = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    assert tokenizer.decode_batch(ids) == processor.decode(pieces)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"treat_whitespace_as_suffix": True}, "spaces at the ends"),
        ({"user_defined_symbols": ["<x>"]}, "user-defined symbols"),
        ({"byte_fallback": True, "vocab_size": 400}, "single bytes"),
    ],
)
def test_sentencepiece_models_that_no_tokenizer_copies_are_refused(flags, message):
    path, _ = train_pieces("bpe", sentences(), **flags)
    with pytest.raises(UserError, match=message):
        module.build_tokenizer(path, Dictionary())


def gpt2_files():
    return write_bpe(new_directory(), sentences(), merges=6)


@pytest.mark.parametrize("whole", [True, False])
def test_bytes(whole):
    folder = gpt2_files()
    encoder = gpt2_bpe_utils.get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))

    def pieces(lines):
        return [[str(number) for number in encoder.encode(line)] for line in lines]

    lines = [*sentences(), "a  b\tc 𝔸 it's 12", "日本"]
    known = [[str(number) for number in range(262)]] if whole else pieces(sentences()[:20])
    dictionary = counted(known)
    dictionary.add_symbol("<mask>")
    tokenizer = module.build_tokenizer(folder, dictionary)
    assert (tokenizer.get_vocab_size() == len(dictionary)) == whole
    assert as_read(tokenizer, dictionary, lines) == numbers(dictionary, pieces(lines))
    if whole:
        ids = [tokenizer.encode(line).ids for line in lines]
        assert [tokenizer.decode(each) for each in ids] == lines


@pytest.mark.parametrize("space", ["", "▁"])
def test_characters(space):
    def cut(lines):
        return [space.join(line.split()) for line in lines]

    dictionary = counted(cut(sentences()[:5]))
    tokenizer = module.build_tokenizer("characters", dictionary)
    lines = [*sentences(), "a  b", "日本"]
    assert as_read(tokenizer, dictionary, lines) == numbers(dictionary, cut(lines))


def test_a_tokenizer_loads_with_its_special_symbols():
    folder = gpt2_files()
    data = data_bin("masked_lm", [str(number) for number in range(262)])
    trained = checkpoint("masked_lm", "learned", data)
    out = export_to(trained, tokens=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(out)
    dictionary = trained.task.source_dictionary
    encoder = gpt2_bpe_utils.get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    for line in ["ba tiba", "1 é"]:
        text = "<s> " + " ".join(map(str, encoder.encode(line)))
        expected = dictionary.encode_line(text, append_eos=True, add_if_not_exist=False).tolist()
        assert tokenizer(line)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == line
    mask = dictionary.index("<mask>")
    for name, index in zip(("bos", "pad", "eos", "unk", "cls", "sep", "mask"), (0, 1, 2, 3, 0, 2)):
        assert getattr(tokenizer, f"{name}_token_id") == index
    assert tokenizer.mask_token_id == mask
    symbols = ["<s>", *map(str, encoder.encode("ba")), "<mask>", *map(str, encoder.encode(" 1"))]
    masked = dictionary.encode_line(" ".join(symbols), add_if_not_exist=False)
    scores = trained.model(masked[None].long())[0][0, masked.tolist().index(mask)]
    model = AutoModelForMaskedLM.from_pretrained(out)
    filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)("ba <mask> 1")
    assert [answer["token"] for answer in filled] == scores.topk(5).indices.tolist()


def test_two_sentencepiece_models_of_one_dictionary_are_two_tokenizers():
    models = [train_pieces("unigram", sentences(), vocab_size=size) for size in (40, 50)]
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


def test_pieces_that_the_dictionary_lacks_are_refused(capsys):
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", ["1", "2", "3"]))
    words = ["--checkpoint", trained.path, "--out", new_directory() / "out"]
    assert main(["export", *map(str, words), "--tokens", str(gpt2_files())]) == 2
    assert "lacks 259 pieces of the tokenizer" in capsys.readouterr().err
    assert main(["export", *map(str, words), "--tokens", "none"]) == 0


def test_a_piece_that_the_dictionary_has_twice_is_refused(capsys):
    """By its number in GPT-2's file, and as it is."""
    files = gpt2_files()
    pieces = json.loads((files / "encoder.json").read_text())
    symbols = [*map(str, pieces.values()), next(iter(pieces))]
    trained = checkpoint("masked_lm", "learned", data_bin("masked_lm", symbols))
    words = ["--checkpoint", trained.path, "--out", new_directory() / "out", "--tokens", files]
    assert main(["export", *map(str, words)]) == 2
    assert "dict.txt: has pieces of the tokenizer twice (1): --tokens" in capsys.readouterr().err


def test_a_data_folder_says_what_cut_its_text(tmp_path):
    with pytest.raises(UserError, match="say with --tokens"):
        module.find_tokenization(None, tmp_path, "")
    (tmp_path / "text").write_text("one two\n")
    for way in ("words", "characters"):
        made = tmp_path / way
        parser = Parser()
        options.add_arguments(parser, characters=way == "characters")
        given = ["--train", tmp_path / "text", "--out", made, "--workers", 1]
        words = ["--words"] if way == "words" else []
        command.run(parser.parse_args([*map(str, given), *words]), formats.plain)
        assert module.find_tokenization(None, made, "") == way
    (tmp_path / "sentencepiece.de.model").touch()
    assert module.find_tokenization(None, tmp_path, "de").name == "sentencepiece.de.model"
    assert module.find_tokenization("words", tmp_path, "de") == "words"
