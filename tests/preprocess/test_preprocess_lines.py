"""What becomes an item: formats of corpora, sentences, documents, long and invalid lines."""

from __future__ import annotations

import codecs
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, TokenBlockDataset
from fairseq.data.indexed_dataset import MMapIndexedDataset

from binarize import formats
from binarize.items import split_long_sizes
from binarize.sentences import split_sentences
from fairseq_posenc.errors import UserError
from tests.helpers.preprocess import binarize

EOS = 2
DOCUMENTS = "a b\nc\n\n\n\nd\n"


def run(tmp_path: Path, text: str | bytes, *arguments: object, lines=formats.plain) -> list[str]:
    """Return the items of a text, or of another --train, as words and </s>."""
    path = tmp_path / "text"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    binarize(lines, "--train", path, "--out", tmp_path / "bin", "--words", *arguments)
    return read(tmp_path / "bin")


def read(folder: Path, split: str = "train") -> list[str]:
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    items = MMapIndexedDataset(str(folder / split))
    return [" ".join(dictionary[number] for number in item) for item in items]


def counts(tmp_path: Path) -> dict[str, int]:
    return json.loads((tmp_path / "bin" / "manifest.json").read_text())["splits"]["train"]["counts"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("documents", ["a b </s>", "c </s>", "</s>", "d </s>"]),
        ("drop", ["a b </s>", "c </s>", "d </s>"]),
        ("keep", ["a b </s>", "c </s>", "</s>", "</s>", "</s>", "d </s>"]),
    ],
)
def test_empty_lines(tmp_path, how, expected):
    assert run(tmp_path, DOCUMENTS, "--empty-lines", how) == expected


@pytest.mark.parametrize("chunk", [3, 4, 5, 6, 7, 9, 100])
def test_documents_do_not_depend_on_where_chunks_end(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr("binarize.sources.CHUNK_BYTES", chunk)
    assert run(tmp_path, f"\n\n{DOCUMENTS}\n\n \n") == ["a b </s>", "c </s>", "</s>", "d </s>"]
    assert counts(tmp_path)["document_ends"] == 1
    assert counts(tmp_path)["items"] == 4


def test_each_file_is_a_document(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    (books / "2").write_text("c\n")
    (books / "1").write_text("a\nb")
    (books / ".hidden").write_bytes(b"\xff")
    cache = books / ".cache" / "huggingface"
    cache.mkdir(parents=True)
    (cache / "books.metadata").write_text("d41d8cd98f\n")  # what a download leaves beside the files
    assert run(tmp_path, "", "--train", str(books)) == ["a </s>", "b </s>", "</s>", "c </s>"]


def blocks(folder: Path, mode: str, size: int) -> list[list[int]]:
    data = MMapIndexedDataset(str(folder / "train"))
    dataset = TokenBlockDataset(data, data.sizes, size, pad=1, eos=EOS, break_mode=mode)
    return [block.tolist() for block in dataset]


@pytest.mark.parametrize(("empty", "ends"), [("documents", 2), ("keep", 4)])
def test_fairseqs_packing_means_what_the_papers_say(tmp_path, empty, ends):
    """FULL-SENTENCES: an extra </s> between documents; DOC-SENTENCES: none crosses a boundary.

    Every item that is kept empty is another </s>.
    """
    run(tmp_path, DOCUMENTS, "--empty-lines", empty)
    a, b, c, d = (Dictionary.load(str(tmp_path / "bin/dict.txt")).index(w) for w in "abcd")
    assert blocks(tmp_path / "bin", "complete", 19) == [[a, b, EOS, c, *[EOS] * ends, d, EOS]]
    assert blocks(tmp_path / "bin", "complete_doc", 19) == [[a, b, EOS, c, EOS], [d, EOS]]


def test_json_lines(tmp_path):
    records = [{"text": "a b\nc\r\n\n", "url": "x"}, {"text": ""}, {"text": "d\u2028e"}]
    text = "\n".join(json.dumps(record) for record in records)
    found = run(tmp_path, text, lines=formats.JsonField("text"))
    assert found == ["a b </s>", "c </s>", "</s>", "d e </s>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not a JSON object"),
        ('{"body": "a"}', 'not a JSON object with a text "text"'),
        ('{"text": 1}', 'not a JSON object with a text "text"'),
        ('["text"]', 'not a JSON object with a text "text"'),
        (r'{"text": "\ud800"}', "half of a surrogate pair"),
        ('{"text": ' + "[" * 9999, "not a JSON object"),
    ],
)
def test_lines_that_are_not_json_are_named(tmp_path, line, message):
    text = f'{{"text": "good"}}\n{line}\n{{"text": "better"}}\n'
    with pytest.raises(UserError, match=f"text, line 2: {message}.*--invalid-lines skip"):
        run(tmp_path, text, lines=formats.JsonField("text"))
    found = run(tmp_path, text, "--invalid-lines", "skip", lines=formats.JsonField("text"))
    assert found == ["good </s>", "</s>", "better </s>"]


@pytest.mark.parametrize("broken", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_broken_utf_8_is_named_by_file_and_line(tmp_path, broken, monkeypatch, capsys):
    monkeypatch.setattr("binarize.sources.CHUNK_BYTES", 5)
    text = b"first\r\n\xc3\xa9\rthird\nab" + broken + b"c\nlast\n"
    with pytest.raises(UserError, match=r"text, line 4: byte 0x.. at column 3 is not UTF-8"):
        run(tmp_path, text)
    found = run(tmp_path, text, "--invalid-lines", "skip")
    assert found == ["first </s>", "é </s>", "third </s>", "last </s>"]
    assert counts(tmp_path)["invalid_lines"] == 1
    assert counts(tmp_path)["lines"] == 5
    assert "skipped" in capsys.readouterr().err


PILE = [
    {"text": "a b", "meta": {"pile_set_name": "Pile-CC"}},
    {"text": "c", "meta": {"pile_set_name": "Books3"}},
    {"text": "d", "meta": {"pile_set_name": "Pile-CC"}},
    {"text": "e"},
]


def test_json_lines_of_one_kind_alone(tmp_path):
    text = "\n".join(json.dumps(record) for record in PILE)
    where = formats.parse_where("meta.pile_set_name=Pile-CC")
    found = run(tmp_path, text, lines=formats.JsonField("text", where))
    assert found == ["a b </s>", "</s>", "d </s>"]
    with pytest.raises(UserError, match="--where Pile-CC: write FIELD=VALUE, as in"):
        formats.parse_where("Pile-CC")


@pytest.mark.parametrize("value", ["true", "True", "null", "None", "2", "[1, null]", "text"])
def test_values_other_than_texts_are_chosen_as_they_stand_in_the_file(value):
    values = [True, None, 2, [1, None], "text"]
    chooses = formats.JsonField("text", ("flag", value))
    (found,) = [kind for kind in values if chooses(json.dumps({"text": "a", "flag": kind}))]
    assert value in (json.dumps(found), str(found))
    assert not chooses(json.dumps({"text": "a"}))  # also for null: the field is absent


def test_wikipedia_extracts(tmp_path):
    text = '<doc id="1" title="A">\nA\n\na b\n\nc\n</doc>\n<doc id="2">\nB\n</doc>\n'
    found = run(tmp_path, text, lines=formats.wikipedia)
    assert found == ["A </s>", "a b </s>", "c </s>", "</s>", "B </s>"]


WIKITEXT = " \n = A = \n \n one \n = = B = = \n \n two = 2 \n \n = C = \n three \n"


@pytest.mark.parametrize(
    ("articles", "headings", "expected"),
    [
        (True, True, ["= A =", "one", "= = B = =", "two = 2", "", "= C =", "three"]),
        (True, False, ["one", "two = 2", "", "three"]),
        (False, False, ["", "", "one", "", "two = 2", "", "three"]),
    ],
)
def test_wikitext_options(tmp_path, articles, headings, expected):
    empty = "documents" if articles else "keep"
    lines = formats.WikiText(articles, headings)
    found = run(tmp_path, WIKITEXT, "--empty-lines", empty, lines=lines)
    assert found == [f"{line} </s>".strip() for line in expected]


SENTENCES = [
    "He came. | She left! | Why? | Nobody knows…",
    "Mr. Smith met Dr. J. R. Brown at 5 p.m. on Monday. | They talked about the U.S. Senate.",
    "It grew to 3.5 m. | The U.S. | It is large.",
    '"Stop!" he said. | "Why?" | (Nobody knew.) | [Later.] | Then it rained.',
    "He said no. | The end. | See no. 5 and Fig. 3 or pp. 10 of vol. 2, e.g. Paris etc. and more.",
    "See www.example.com for more. | Version 2.0 is out.",
    "a tokenized line . | The next one , by Mr. X . | And H. americanus .",
    "战争开始了。 | “为什么？” | 没有人知道！ | 结束",
    "Ende. | Über uns, z.B. Anna. | ¿Qué? | Élan.",
    "no end",
    "He left the U.S. | «\u00a0The end\u00a0», said Mr. «\u202fX.",
    "1. First point. | Second point.",
    "Two points follow. | 1. The first. | 2. The second. | (3. The third.) | “4. The last.”",
]


@pytest.mark.parametrize("marked", SENTENCES)
def test_sentences(marked):
    expected = [part.strip() for part in marked.split("|")]
    line = " ".join(expected) if not marked.startswith("战") else "".join(expected)
    assert list(split_sentences(line)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_splitting_loses_white_space_alone(seed):
    generator = random.Random(seed)
    pieces = [*"aB1.!?…。！？\"'”’)]」 \t\u3000\u2028", "Mr.", " U.S. ", "The ", "...", "中"]
    line = "".join(generator.choice(pieces) for _ in range(2000))
    found = list(split_sentences(line))
    assert "".join("".join(found).split()) == "".join(line.split())
    assert all(sentence and sentence == sentence.strip() for sentence in found)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path, compressed):
    content = codecs.BOM_UTF8 + "eins zwei\n\ufeffeins\n".encode()
    path = tmp_path / ("content.gz" if compressed else "content")
    path.write_bytes(gzip.compress(content) if compressed else content)
    run(tmp_path, "", "--train", path)
    dictionary = Dictionary.load(str(tmp_path / "bin" / "dict.txt"))
    assert set(dictionary.symbols[dictionary.nspecial :]) >= {"eins", "zwei", "\ufeffeins"}
    assert dictionary.count[dictionary.index("eins")] == 1


def test_splitting_takes_linear_time():
    for unit in ("a. A", "A. ", ". ", "a.", "” ", "。", "(", " "):
        assert list(split_sentences(unit * 50_000)) or not unit.strip()


def test_long_lines_are_cut_into_equal_parts(tmp_path):
    found = run(tmp_path, "a b c d e f g h i j\nk\n", "--longest-line", 4)
    assert found == ["a b c d", "e f g h", "i j </s>", "k </s>"]
    assert counts(tmp_path)["long_lines"] == 1


def test_parts_of_a_line_have_one_end_in_the_warning_of_unknown_words(tmp_path, capsys):
    (tmp_path / "dict").write_text("a 1\n")
    run(tmp_path, "a a a a a a b b b b b\n", "--dict", tmp_path / "dict", "--longest-line", 4)
    assert "<unk>" not in capsys.readouterr().err
    assert counts(tmp_path)["cuts"] == 2


@pytest.mark.parametrize("longest", [4, 5, 7, 64])
def test_cut_sizes(longest):
    sizes = np.arange(1, 400, dtype=np.int32)
    cut = split_long_sizes(sizes, longest)
    assert cut.dtype == np.int32
    assert cut.max() <= longest
    assert set(np.cumsum(sizes)) <= set(np.cumsum(cut))  # every line still ends an item
    assert len(cut) == sum(-(-size // longest) for size in range(1, 400))
    assert (cut == 1).sum() == 1  # only the line that was </s> alone


def test_blocks_of_complete_mode_fit_after_cutting(tmp_path):
    run(tmp_path, "w " * 1000 + "\nv v\n", "--longest-line", 15)
    assert max(map(len, blocks(tmp_path / "bin", "complete", 15))) <= 15
