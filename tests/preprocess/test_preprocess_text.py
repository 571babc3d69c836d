"""Raw text to data-bin: the same bytes as fairseq's own chain, for every kind of token."""

from __future__ import annotations

import gzip
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli import preprocess as fairseq_preprocess

from binarize import formats, sources
from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens import subwords
from tests.helpers.preprocess import DATA, binarize, bpe_options, published, write_pieces

BENCHMARK = spec_from_file_location(
    "preprocess_benchmark", Path(__file__).parents[2] / "benchmarks" / "preprocess.py"
)
assert BENCHMARK
assert BENCHMARK.loader
# Its workers look its functions up by the name of the module.
chain = sys.modules["preprocess_benchmark"] = module_from_spec(BENCHMARK)
BENCHMARK.loader.exec_module(chain)
BPE = DATA / "gpt2_bpe"
GPT2 = bpe_options(BPE)
KEEP = ["--empty-lines", "keep"]
FILES = ("train.bin", "train.idx", "dict.txt")

# What the two regular expression engines, Python and fairseq could treat differently.
PIECES = [
    *"aZé9٣½߿ªʰ中文字あ한🙂👩‍👩‍👧ﬁİßſK.,;!?'\"-_()<>|",
    *" \t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\ufeff\x00\x7f",
    *"\u0301\u0345\U000e0100\U00010940\U000107bb\U0001e900\U00032000\U000e1000\U0010ffff",
    *("<|endoftext|>", "'s", "'ll", "'RE", "  ", "   ", "</s>", "<pad>", "<mask>", "\t \t"),
    *("the ", "The", " quick", " 1999", "ing ", "http://", "\n", "\n\n", "\n\n\n", "\r", "\r\n"),
]


def make_text(seed: int, pieces: int = 3000) -> str:
    generator = random.Random(seed)
    return "".join(generator.choice(PIECES) for _ in range(pieces))


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def run_fairseq(text: Path, dest: Path, *arguments: object) -> None:
    """Run fairseq-preprocess on symbols between spaces."""
    given = ["--only-source", "--trainpref", text, "--destdir", dest, *arguments]
    parser = fairseq_options.get_preprocessing_parser()
    fairseq_preprocess.main(parser.parse_args([str(argument) for argument in given]))


def assert_equal_folders(ours: Path, theirs: Path) -> None:
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def items(folder: Path, split: str = "train") -> list[list[int]]:
    return [item.tolist() for item in MMapIndexedDataset(str(folder / split))]


@published
@pytest.mark.parametrize("keep_empty", [False, True], ids=["drop", "keep"])
def test_gpt2_bpe_is_byte_identical_to_fairseqs_chain(tmp_path, keep_empty, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 700)  # many chunks
    text = write(tmp_path / "text", make_text(1) + "\nlast line without an end")
    chain.encode_as_fairseq(text, tmp_path / "bpe", BPE, 1, keep_empty)
    run_fairseq(tmp_path / "bpe", tmp_path / "theirs", "--srcdict", BPE / "dict.txt")
    given = ["--train", text, *GPT2, "--empty-lines", "keep" if keep_empty else "drop"]
    binarize(formats.plain, *given, "--out", tmp_path / "ours")
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")


@pytest.fixture(scope="module")
def roberta() -> tuple[subwords.GPT2, Dictionary]:
    dictionary = load_dictionary(BPE / "dict.txt", mask=False)
    return subwords.GPT2(BPE / "encoder.json", BPE / "vocab.bpe", dictionary), dictionary


@published
@pytest.mark.parametrize("seed", range(6))
def test_gpt2_bpe_of_random_unicode_is_fairseqs(seed, roberta):
    encoder, dictionary = roberta
    generator = random.Random(seed)
    text = make_text(seed) + "".join(chr(generator.randrange(0xD800)) for _ in range(1000))
    lines = [line.strip() for line in formats.split_lines(text)]
    tokens, sizes = encoder.encode(lines)
    theirs = [[str(n) for n in encoder._words._encoder.encode(line)] for line in lines]
    expected = [[*map(dictionary.index, line), dictionary.eos()] for line in theirs]
    assert sizes.tolist() == [len(line) for line in expected]
    assert tokens.tolist() == [number for line in expected for number in line]
    for whole in (text, "ordinary, with\nline ends  "):  # with offsets: a text as it stands
        numbers = [dictionary.index(str(n)) for n in encoder._words._encoder.encode(whole)]
        assert encoder.tokens(whole).ids.tolist() == numbers


@published
@pytest.mark.parametrize("unit", ["a", " ", "^", "中", "\u0301"])
def test_gpt2_bpe_of_long_runs_is_fairseqs(unit, roberta):
    encoder, dictionary = roberta
    line = f"x{unit * 5000}x"
    tokens, _ = encoder.encode([line, "and more"])
    theirs = encoder._words._encoder.encode(line)
    assert tokens[: len(theirs)].tolist() == [dictionary.index(str(n)) for n in theirs]


def test_words_and_their_dictionary_are_fairseqs(tmp_path):
    text = write(tmp_path / "text", make_text(2) + "b a b <unk> a b\n c\u2028c </s> <pad>\n")
    run_fairseq(text, tmp_path / "theirs")
    binarize(formats.plain, "--train", text, "--out", tmp_path / "ours", "--words", *KEEP)
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")


def test_a_dictionary_with_limits_is_fairseqs(tmp_path):
    text = write(tmp_path / "text", make_text(3))
    run_fairseq(text, tmp_path / "theirs", "--thresholdsrc", 3, "--nwordssrc", 30)
    limits = ["--words", "--min-count", 3, "--max-symbols", 30, *KEEP]
    binarize(formats.plain, "--train", text, "--out", tmp_path / "ours", *limits)
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("keep_spaces", [False, True], ids=["without", "with"])
def test_characters_and_their_dictionary_are_fairseqs(tmp_path, keep_spaces):
    text = make_text(4) + "汉字 and\u3000words\n"
    text = "".join(c for c in text if c != "▁")
    between = "▁" if keep_spaces else ""
    spaced = [" ".join(between.join(line.split())) for line in formats.split_lines(text)]
    write(tmp_path / "spaced", "\n".join(spaced) + "\n")
    run_fairseq(tmp_path / "spaced", tmp_path / "theirs")
    more = ["--keep-spaces"] if keep_spaces else []
    path = write(tmp_path / "text", text)
    arguments = ["--train", path, "--out", tmp_path / "ours", *KEEP, *more]
    binarize(formats.plain, *arguments, characters=True)
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    generator = random.Random(0)
    stems = ["quick", "brown", "fox", "jump", "over", "lazy", "dog", "中文", "été"]
    words = [stem + end for stem in stems for end in ("", "s", "ing")]
    sentences = [" ".join(generator.choices(words, k=9)) for _ in range(300)]
    return write_pieces(tmp_path_factory.mktemp("pieces"), 50, sentences, hard_vocab_limit=True)


def test_sentencepieces_are_those_of_the_chain(tmp_path, pieces):
    text = write(tmp_path / "text", make_text(5) + "the quick brown foxes\n")
    binarize(formats.plain, "--train", text, "--out", tmp_path / "ours",
        "--sentencepiece-model", pieces, *KEEP)  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    with open(text, encoding="utf-8") as lines, open(tmp_path / "sp", "w", encoding="utf-8") as out:
        for line in lines:
            # By number, as spm_encode gives rare characters themselves, which may hold white space.
            print(*[model.id_to_piece(piece) for piece in model.encode(line.strip())], file=out)
    dictionary = tmp_path / "ours" / "dict.txt"
    run_fairseq(tmp_path / "sp", tmp_path / "theirs", "--srcdict", dictionary)
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")
    assert len(Dictionary.load(str(dictionary))) == 4 + 50 - 3  # <unk>, <s>, </s> are fairseq's


@published
def test_wikitext_is_that_of_the_chain(tmp_path):
    with gzip.open(DATA / "wikitext-2" / "valid.txt.gz", "rb") as file:
        sample = b"".join(file.readlines()[:300])
    (tmp_path / "text").write_bytes(sample)
    chain.encode_as_fairseq(tmp_path / "text", tmp_path / "bpe", BPE, 1, keep_empty=True)
    run_fairseq(tmp_path / "bpe", tmp_path / "theirs", "--srcdict", BPE / "dict.txt")
    files = ["--train", tmp_path / "text", "--out", tmp_path / "ours"]
    binarize(formats.WikiText(False, True), *files, *GPT2, *KEEP)
    assert_equal_folders(tmp_path / "ours", tmp_path / "theirs")


def test_valid_and_test_use_the_dictionary_of_train(tmp_path):
    for name, text in {"train": "a a b\n", "valid": "b c\n", "test": "c a\n"}.items():
        write(tmp_path / name, text)
    files = [part for name in ("train", "valid", "test") for part in (f"--{name}", tmp_path / name)]
    binarize(formats.plain, *files, "--out", tmp_path / "bin", "--words")
    a, b, unk, eos = 4, 5, 3, 2
    assert items(tmp_path / "bin") == [[a, a, b, eos]]
    assert items(tmp_path / "bin", "valid") == [[b, unk, eos]]
    assert items(tmp_path / "bin", "test") == [[unk, a, eos]]


def test_the_benchmark_refuses_a_text_without_bytes_to_repeat(tmp_path):
    with pytest.raises(UserError, match=r"text: the file is empty; name a file with text"):
        chain.write_text(write(tmp_path / "text", ""), tmp_path / "out", 1)


@pytest.mark.parametrize(("symbols", "dtype"), [(65_499, np.uint16), (65_500, np.uint32)])
def test_numbers_have_fairseqs_type(tmp_path, symbols, dtype):
    text = write(tmp_path / "text", " ".join(f"w{i}" for i in range(symbols - 4)) + "\n")
    binarize(formats.plain, "--train", text, "--out", tmp_path / "bin", "--words",
        "--max-symbols", symbols)  # fmt: skip
    found = MMapIndexedDataset(str(tmp_path / "bin" / "train"))
    size = len(Dictionary.load(str(tmp_path / "bin" / "dict.txt")))
    assert found._index.dtype == (np.uint16 if size < 65_500 else np.uint32)
    assert len(set(found[0].tolist())) == symbols - 3


def with_merges(folder: Path, *merges: str) -> list[object]:
    """Return options for a vocabulary of bytes, "ab" and "abc" with given merges."""
    names = [*bytes_to_unicode().values(), "ab", "abc", "bc"]
    entries = ", ".join(f'"{name}": {i}' for i, name in enumerate(names) if name not in '"\\')
    entries += r', "\"": 300, "\\": 301'
    write(folder / "encoder.json", f"{{{entries}}}")
    write(folder / "vocab.bpe", "\n".join(["#version", *merges, ""]))
    write(folder / "dict.txt", "".join(f"{i} 1\n" for i in range(302)))
    return bpe_options(folder)


def test_another_byte_level_vocabulary_works(tmp_path):
    chosen = with_merges(tmp_path, "a b", "ab c")
    text = write(tmp_path / "text", "abc ab\n")
    binarize(formats.plain, "--train", text, "--out", tmp_path / "bin", *chosen)
    numbers = [257, None, 256]  # abc, the space, ab
    assert [items(tmp_path / "bin")[0][i] for i in (0, 2)] == [4 + n for n in numbers if n]


@pytest.mark.parametrize(
    ("merges", "changed", "message"),
    [
        (["a b", "b a"], ("", ""), "lacks the piece 'ba'"),
        (["a b c"], ("", ""), "lacks the piece 'a b c' of"),
        (["a b"], ('"!"', '"!!"'), "lacks the piece '!', which is a single byte"),
        (["a b"], ("257", "256"), "must give each piece a different whole number"),
        (["a b"], ("{", "#version"), "encoder.json, .*: give GPT-2's files .Expecting value"),
    ],
    ids=["missing", "three", "byte", "number", "no json"],
)
def test_broken_merges_and_numbers_are_refused(tmp_path, merges, changed, message):
    chosen = with_merges(tmp_path, *merges)
    encoder = (tmp_path / "encoder.json").read_text(encoding="utf-8")
    write(tmp_path / "encoder.json", encoder.replace(*changed))
    text = write(tmp_path / "text", "abc\n")
    with pytest.raises(UserError, match=message):
        binarize(formats.plain, "--train", text, "--out", tmp_path / "bin", *chosen)
