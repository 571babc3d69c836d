"""Text files of every form, and the numbers and characters of their tokens."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
from functools import partial
from itertools import combinations_with_replacement

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens import files, tokenizer
from fairseq_posenc.tokens.subwords import GPT2, PieceEncoder, Pieces
from fairseq_posenc.tokens.tokenizer import token_dtype
from tests.helpers.preprocess import write_bpe, write_pieces
from tests.helpers.tiny_models import make_dictionary

TEXT = "Zwölf Boxkämpfer \n\n  jagen\x0bVik\u2028tor 🥊\t\r\n".encode()
LINES = ["Zwölf Boxkämpfer", "", "  jagen\x0bVik\u2028tor 🥊"]  # only a line feed ends a line
FORMS = {".txt": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", FORMS)
def test_lines_of_a_file_and_of_two_that_are_one(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(FORMS[suffix](TEXT))
    assert files.read_lines(path, "--text") == LINES
    path.write_bytes(FORMS[suffix](TEXT) + FORMS[suffix](b"more"))
    assert files.read_lines(path, "--text") == [*LINES, "more"]


@pytest.mark.parametrize("suffix", [suffix for suffix in FORMS if suffix != ".txt"])
@pytest.mark.parametrize("damage", ["half", "text"])
def test_a_damaged_file_is_one_line_that_names_it(suffix, damage, tmp_path):
    path = tmp_path / f"a{suffix}"
    whole = FORMS[suffix](np.random.default_rng(0).bytes(5000))
    path.write_bytes(whole[: len(whole) // 2] if damage == "half" else b"plain text\n" * 9)
    with pytest.raises(UserError, match=rf"^--text {path}: .*\Z"):  # in a line
        files.read_lines(path, "--text")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"a\nb\n\xff", "line 3: byte 0xff is not UTF-8"),
        ("a\nü".encode("latin-1"), "line 2: byte 0xfc is not UTF-8"),
        ("a".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
    ],
)
def test_what_is_no_text_is_shown_with_its_line(content, said, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        files.read_lines(path, "--text")
    for other in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UserError, match=f"--text {other}: .*name a file that can be read"):
            files.read_lines(other, "--text")


def test_a_mark_of_utf_8_is_no_text_and_refused_bytes_have_names():
    assert files.decode_text(b"\xef\xbb\xbfa\xef\xbb\xbf", "it") == "a\ufeff"
    refused = {b"\0": "a NUL", b"\r": "a carriage return"}
    assert files.decode_text(b"a\nb", "it", refused) == "a\nb"
    with pytest.raises(UserError, match=r"^it, line 12: a carriage return; save it"):
        files.decode_text(b"a\nb\nc\r\0\xff", "it", refused, first_line=10)


def test_lines_that_arrive_come_at_once(tmp_path):
    reads, writes = os.pipe()
    arriving = files.read_arriving_lines(reads, "stdin")
    os.write(writes, b"one \ntwo\nthr")
    assert next(arriving) == ["one", "two"]
    os.write(writes, b"ee\n")
    assert next(arriving) == ["three"]
    os.write(writes, b"\xef\xbb\xbfmark\n")  # U+FEFF is a byte-order mark only at the beginning
    assert next(arriving) == ["\ufeffmark"]
    os.write(writes, b"\xc3")
    os.write(writes, b"\xbc\n4")
    assert next(arriving) == ["ü"]
    os.close(writes)
    assert list(arriving) == [["4"]]
    os.close(reads)
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\n\xff\n")
    with open(path) as file, pytest.raises(UserError, match="stdin, line 3: byte 0xff"):
        list(files.read_arriving_lines(file.fileno(), "stdin"))


@pytest.fixture
def dictionary():
    return make_dictionary("ab▁")


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_symbols_are_numbered_as_fairseq_does(kind, dictionary):
    lines = ["a b  b", "", "c a", "ab"]
    split = tokenizer.split_words
    if kind == "characters":
        split = partial(tokenizer.split_characters, between="▁")
    encoder = tokenizer.SymbolEncoder(split, dictionary)
    found = encoder.encode(lines)
    cut = {"words": str.split, "characters": lambda line: list("▁".join(line.split()))}[kind]
    encode = partial(dictionary.encode_line, add_if_not_exist=False)
    expected = [encode(" ".join(cut(line))).tolist() for line in lines]
    assert found.sizes.tolist() == [len(line) for line in expected]
    assert found.tokens.tolist() == [number for line in expected for number in line]
    assert (found.sizes.dtype, found.tokens.dtype) == (np.int32, np.uint16)
    assert [encoder.index(symbol) for symbol in ("b", "c")] == [dictionary.index("b"), 3]


def test_large_dictionaries_have_larger_numbers(dictionary):
    assert token_dtype(dictionary) == np.uint16
    for number in range(65_500 - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    assert token_dtype(dictionary) == np.uint32


@pytest.mark.parametrize(("unknown", "warned"), [(0, False), (5, False), (6, True), (12, True)])
def test_a_text_of_unknown_words_is_warned_of(unknown, warned, capsys):
    tokenizer.warn_of_unknown("a.txt", unknown, 10)
    said = f"warning: a.txt: {unknown} of {max(unknown, 10)} tokens are <unk>"
    assert (said in "".join(capsys.readouterr())) == warned


TEXTS = [
    "  Zoë Müller was born in København (北京?) in 1912. ",
    "e\u0301t\u0301e 😀😀x\n\nthe\u00a0 ﬁsh ate ½ of ㎏, it's 3–4%\t!",
    "the cat sat on the mat, and the cat's mat was the best mat that there was",
    "",
    " ",
]


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True, "character_coverage": 0.98}])
def test_the_tokens_of_words_have_their_characters_and_no_others(tmp_path, options):
    lines = [text for text in TEXTS if text.strip()] * 20
    pieces = Pieces(write_pieces(tmp_path, 330, lines, **options))
    encoder = PieceEncoder(pieces, pieces.build_dictionary())
    for text in [*TEXTS, "3 ¾"]:
        tokens = encoder.tokens(text)
        assert (tokens.starts < tokens.ends).all()  # of ¾, too, which becomes several
        words = [word.span() for word in re.finditer(r"\S+", text)]
        for (start, _), (_, end) in combinations_with_replacement(words, 2):
            first, last = tokens.covering(start, end)
            assert text[tokens.starts[first] : tokens.ends[last]] == text[start:end]
            needed = np.flatnonzero((tokens.ends > start) & (tokens.starts < end))
            assert [*range(first, last + 1)] == needed.tolist()
        assert tokens.covering(0, 0) is None
        assert tokens.ids.tolist() == encoder.encode([text]).tokens[:-1].tolist()


@pytest.mark.parametrize("text", [*TEXTS, "\x7f\x80 \u07ff\u0800\uffff\U00010000, of 1 byte to 4"])
def test_offsets_of_bytes_are_those_of_another_library(tmp_path, text):
    dictionary = load_dictionary(write_bpe(tmp_path, TEXTS, merges=60) / "dict.txt")
    files = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    ours = GPT2(*files, dictionary).tokens(text)
    theirs = ByteLevelBPETokenizer(*map(str, files)).encode(text)
    assert ours.ids.tolist() == [dictionary.index(str(number)) for number in theirs.ids]
    assert dictionary.unk() not in ours.ids
    for start, end, (begun, ended) in zip(ours.starts, ours.ends, theirs.offsets):
        piece = text[begun:ended]
        assert (text[start:end], end) == (piece.lstrip() or piece, ended)
