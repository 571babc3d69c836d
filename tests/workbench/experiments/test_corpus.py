"""The text of a comparison: its documents, what is held out, and the data-bin made of it.

Trainings go on as well where validation text leaks, or is cut or counted wrongly: found here alone.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments import corpus, data_bin


def test_docstrings_of_the_library_are_read_and_nothing_is_imported(tmp_path):
    files = {
        "tool.py": (
            '"""About the tool."""\n'
            "raise SystemExit('imported')\n"
            "class A:\n"
            '    """About A.\n\n    More about A.\n    """\n'
            "    async def f(self):\n"
            '        """About f."""\n'
            "x = 'not a docstring'\n"
        ),
        "package/broken.py": "def (:\n",
        "package/undocumented.py": "x = 1\n",
        "test/test_tool.py": '"""A test."""\n',
        "site-packages/other.py": '"""Somebody else\'s."""\n',
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    *reference, found = corpus.read_python_documents(tmp_path)
    assert found == ["About the tool.", "About A.", "More about A.", "About f."]
    assert any('"assert" statement' in document[0] for document in reference)


@pytest.mark.parametrize(
    ("text", "document"),
    [("one\ntwo\n\n \nthree\n", ["one two", "three"]), ("one\ntwo\n", ["one", "two"])],
)
def test_a_text_is_cut_at_empty_lines_or_else_at_lines(text, document):
    assert corpus.split_into_documents(text) == [document]
    found = corpus.split_into_documents("word " * 5000)  # on one line
    assert len(found) > 5
    assert sum(map(corpus.count_words, found)) == 5000


def test_the_validation_text_is_a_twentieth_by_document_and_not_in_the_training_text():
    documents = [[f"{n} word"] for n in range(200)]
    train, valid = corpus.hold_out(documents)
    assert sorted(train + valid) == sorted(documents)
    assert len(valid) == 10
    assert corpus.hold_out(documents) == (train, valid)
    assert [len(part) for part in corpus.hold_out([["x"], ["y " * 99]])] == [1, 1]
    assert corpus.drop_repeats([["x", "y", "x"], ["x"]]) == [["x", "y"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b" \n\n", "the file is empty"),
        (b"fine\nbad \xff byte\n", "line 2: byte 0xff is not UTF-8"),
        (b"fine\nfine\n\0\n", "line 3: a NUL byte"),
        (b"\xef\xbb\xbfonly three words", r"text.txt: 3 words; at least 5,000"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        corpus.read_documents(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def small_text(path: Path) -> Path:
    """Write sentences of a toy grammar, in which the order of the words matters."""
    chance = random.Random(7)
    nouns, verbs = ["cat", "dog", "bird", "fox", "tree", "stone"], ["sees", "hears", "likes"]
    lines = []
    for _ in range(750):
        one, verb, other = map(chance.choice, (nouns, verbs, nouns))
        lines.append(f"the {one} {verb} the {other} number {chance.randrange(1000)} .")
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_symbols_of_fairseq_stay_out_of_the_text(tmp_path):
    text = small_text(tmp_path / "text.txt")
    text.write_text(text.read_text().replace("number", "<mask> <pad>"))
    facts = data_bin.make_data(text, 60, tmp_path / "data")
    pieces = (tmp_path / "data" / "train.pieces").read_text().split()
    assert len(pieces) == facts.train_tokens
    assert not {"<mask>", "<pad>", "<s>", "</s>"} & set(pieces)
    assert (tmp_path / "data" / "binary" / "dict.txt").read_text().count("\n") <= 60


@pytest.mark.slow
@pytest.mark.parametrize("size", [5000, 3])
def test_a_vocabulary_that_does_not_fit_leaves_nothing(size, tmp_path):
    text, folder = small_text(tmp_path / "text.txt"), tmp_path / "data"
    with pytest.raises(UserError, match=rf"--vocab-size {size}: Vocabulary size") as error:
        data_bin.make_data(text, size, folder)
    assert "--character_coverage" not in str(error.value)  # not an option of ours
    assert list(tmp_path.iterdir()) == [text]
    data_bin.make_data(text, int(re.findall(r"\d+", str(error.value))[-1]), folder)


def test_the_unigram_perplexity_is_that_of_counting():
    """Three kinds with one added each: of seven, `a` has 3, `</s>` 2, and `b`, unseen, 1."""
    found = data_bin.unigram_perplexity([["a", "a"], []], [["a", "b"]])
    assert found == pytest.approx((7 / 3 * 7 / 1 * 7 / 3) ** (1 / 3))
