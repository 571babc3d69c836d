"""Text files of every form, and the numbers and characters of their tokens."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os

import numpy as np
import pytest
from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens import files, tokenizer
from fairseq_posenc.tokens.tokenizer import TextTokens, spans_of_bytes, token_dtype

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
    with pytest.raises(UserError) as caught:
        files.read_lines(path, "--text")
    assert str(caught.value).startswith(f"--text {path}: ")
    assert "\n" not in str(caught.value)


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
    made = Dictionary()
    for symbol in ("a", "b", "▁"):
        made.add_symbol(symbol)
    return made


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_symbols_are_numbered_as_fairseq_does(kind, dictionary):
    lines = ["a b  b", "", "c a", "ab"]
    between = {
        "words": tokenizer.split_words,
        "characters": lambda x: tokenizer.split_characters(x, "▁"),
    }
    encoder = tokenizer.SymbolEncoder(between[kind], dictionary)
    found = encoder.encode(lines)
    cut = {"words": str.split, "characters": lambda line: list("▁".join(line.split()))}[kind]
    expected = [
        dictionary.encode_line(" ".join(cut(line)), add_if_not_exist=False).tolist()
        for line in lines
    ]
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
    printed = "".join(capsys.readouterr())
    assert (
        f"warning: a.txt: {unknown} of {max(unknown, 10)} tokens are <unk>" in printed
    ) == warned


def test_characters_of_tokens_of_bytes():
    text = "aß€🥊b"  # of 1, 2, 3, 4 and 1 bytes
    assert spans_of_bytes(text, np.array([1, 2, 3, 4, 1])) == [(n, n + 1) for n in range(5)]
    assert spans_of_bytes(text, np.array([3, 8])) == [(0, 2), (2, 5)]
    assert spans_of_bytes(text, np.array([2, 1, 7, 1])) == [(0, 2), (1, 2), (2, 4), (4, 5)]


def test_tokens_that_cover_a_span():
    tokens = TextTokens.from_spans("the  cat sat", [7, 8, 9], [(0, 3), (3, 8), (8, 12)])
    assert tokens.starts.tolist() == [0, 5, 9]
    assert tokens.ends.tolist() == [3, 8, 12]
    covered = {(0, 3): (0, 0), (1, 6): (0, 1), (5, 12): (1, 2), (3, 5): None, (2, 3): (0, 0)}
    assert {span: tokens.covering(*span) for span in covered} == covered
    assert TextTokens.from_spans("a  b", [1, 2], [(0, 1), (1, 3)]).starts.tolist() == [0, 1]
