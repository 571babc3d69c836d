"""What preprocessing is given: dictionaries, texts in UTF-16, and numbers as options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from tests.helpers.glue_files import write_task
from tests.helpers.preprocess import WORDS, start, write_pieces, write_squad

COMMON = ["--workers", 1, "--words"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(f"{' '.join(WORDS)}\n" * 9)
    return tmp_path / "text"


def binarize(text: Path, *more: object) -> Path:
    out = text.with_name("n")
    start("plain_text", "--train", text, "--out", out, *COMMON, *more)
    return out


@pytest.mark.parametrize(
    "content",
    [
        b"a 1\nbird 2\na 3 #fairseq:overwrite\nold 1\n",
        b"<s> 1 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\na 1\nbird 1\nold 1\n",
        b"a 1\r\nbird 2\r\nold 4",
        b"a 001\nbird 2\t\nold 4   \n",
    ],
    ids=["overwrite", "special", "windows", "spaces"],
)
@pytest.mark.parametrize("program", ["plain_text", "glue", "squad"])
def test_a_given_dictionary_is_kept_byte_for_byte(text, program, content):
    place = text.parent
    (place / "dict.txt").write_bytes(content)
    more: list[object] = ["--dict", place / "dict.txt", "--out", place / "n"]
    if program == "plain_text":
        start(program, *more, *COMMON, "--train", text)
    else:
        more += ["--sentencepiece-model", write_pieces(place, 30)]
    if program == "glue":
        write_task(place / "raw", "RTE", {"train": 9, "valid": 5, "test": 4})
        start(program, *more, place / "raw", "--tasks", "RTE")
    if program == "squad":
        squads = [write_squad(place / name) for name in ("train.json", "dev.json")]
        start(program, *more, "--train", squads[0], "--valid", squads[1])
        assert (place / "n" / "sentencepiece.model").is_file()
    [found] = {path.read_bytes() for path in (place / "n").rglob("dict.txt")
               if path.parent.name != "label"}  # fmt: skip
    assert found == content
    assert Dictionary.load(str(place / "dict.txt")).symbols[4:]


FAULTY = {
    "mark": (b"\xef\xbb\xbfa 1\nold 2\n", r"--dict .*dict.txt, line 1: begins with a byte-order"),
    "tab": (b"a 1\nold\t2\n", r'dict.txt: not .* \(line 2: Incorrect .*: "old.*2"\)'),
    "no count": (b"a 1\nold 2\ntree\n", r'dict.txt: not .* \(line 3: Incorrect .*: "tree"\)'),
    "twice": (b"a 1\r\nold 2\r\na 3\r\n", r"\(line 3: Duplicate word .*'a'\)"),
    "not UTF-8": (b"a 1\rold 2\rt\xe9 3\r", r"\(line 3: 'utf-8' codec can't decode byte 0xe9"),
    "UTF-16": ("a 1\nold 2\n".encode("utf-16"), r"\(line 1: .* can't decode byte 0xff"),
    "long line": (b"a 1\n" + b"x" * 5000, r"\(line 2: Inc.*x\.\.\. \(5,... characters\)\)"),
    "nothing": (b"", r"dict.txt contains no symbols"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_dictionary_is_refused_by_its_line_with_nothing_left(text, case):
    content, message = FAULTY[case]
    path = text.with_name("dict.txt")
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        binarize(text, "--dict", path)
    assert "\n" not in str(refused.value)
    assert sorted(entry.name for entry in text.parent.iterdir()) == ["dict.txt", "text"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x 1\ny 2\n", "warning: train: 108 of 108 tokens are <unk>; is the dictionary that of"),
        ("".join(f"{word} 1\n" for word in WORDS[:5]), "warning: train: 63 of 108 tokens are"),
        ("".join(f"{word} 1\n" for word in WORDS[:6]), ""),
    ],
    ids=["all", "most", "half"],
)
def test_a_text_that_the_dictionary_does_not_know_is_shown(text, content, said, capsys):
    text.with_name("dict.txt").write_text(content)
    binarize(text, "--dict", text.with_name("dict.txt"))
    printed = capsys.readouterr().err
    assert said in printed
    assert ("warning" in printed) == bool(said)


@pytest.mark.parametrize("program", ["glue", "squad"])
def test_tasks_that_the_dictionary_does_not_know_are_shown(tmp_path, program, capsys):
    (tmp_path / "dict.txt").write_text("x 1\n")
    more = ["--dict", tmp_path / "dict.txt", "--sentencepiece-model", write_pieces(tmp_path, 30)]
    if program == "glue":
        write_task(tmp_path / "raw", "RTE", {"train": 9, "valid": 5, "test": 4})
        start(program, tmp_path / "raw", "--tasks", "RTE", *more, "--out", tmp_path / "n")
    else:
        squads = [write_squad(tmp_path / name) for name in ("train.json", "dev.json")]
        files = ["--train", squads[0], "--valid", squads[1]]
        start(program, *files, *more, "--out", tmp_path / "n")
    printed = re.findall(r"(\d+) of \1 tokens are <unk>", capsys.readouterr().err)
    assert len(printed) == {"glue": 3, "squad": 2}[program]


SCRIPTS = {
    "Latin": "The quick brown fox jumps over the lazy dog.\n",
    "Cyrillic": "Съешь же ещё этих мягких французских булок\n",
    "Arabic": "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ\n",
    "Devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा\n",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า\n",
}
WIDE = [*((script, "utf-16-le") for script in SCRIPTS), ("Latin", "utf-32-be"), ("Thai", "utf-16")]


@pytest.mark.parametrize("more", [[], ["--invalid-lines", "skip"]])
@pytest.mark.parametrize(("script", "encoding"), WIDE)
def test_wide_characters_are_refused_even_where_they_are_valid_utf8(text, script, encoding, more):
    good = text.with_name("good")
    good.write_text(SCRIPTS["Latin"])
    text.write_bytes((SCRIPTS[script] * 9).encode(encoding))
    with pytest.raises(UserError, match=r"text(, line 1)?: .*UTF"):
        start("plain_text", "--train", good, text, "--out", text.with_name("n"), *COMMON, *more)
    assert {path.name for path in text.parent.iterdir()} == {"good", "text"}


def test_glues_files_in_utf16_are_refused(tmp_path):
    write_task(tmp_path, "CoLA", {"train": 9, "valid": 5, "test": 4})
    path = tmp_path / "CoLA" / "train.tsv"
    path.write_bytes(path.read_text().encode("utf-16-le"))
    more = ["--tasks", "CoLA", "--sentencepiece-model", write_pieces(tmp_path, 30)]
    with pytest.raises(UserError, match=r"train.tsv: .* as in UTF-16; save it as UTF-8"):
        start("glue", tmp_path, *more, "--out", tmp_path / "n")


def test_some_control_characters_are_text(text):
    text.write_text(f"{SCRIPTS['Latin'] * 9}\x00 \x1b[1m bold \x07\n", encoding="utf-8")
    assert binarize(text).is_dir()


WHOLE = "must be a whole number of at least"
FINITE = "must be a finite number of at least 1"
NUMBERS = [
    ("plain_text --min-count -1", f"argument --min-count: {WHOLE} 0, not '-1'"),
    ("plain_text --max-symbols 4", f"argument --max-symbols: {WHOLE} 5, not '4'"),
    ("plain_text --longest-line 3", f"argument --longest-line: {WHOLE} 4, not '3'"),
    ("plain_text --workers 0", f"argument --workers: {WHOLE} 1, not '0'"),
    ("plain_text --workers 1e3", f"argument --workers: {WHOLE} 1, not '1e3'"),
    ("plain_text --train /", "/n: lies in /, whose files are all read; move it"),
    ("plain_text --workers 5000", "argument --workers: must be at most 1,024, not '5000'"),
    ("plain_text --train TEXT --train TEXT", "text again; name each file once, no links"),
    ("plain_text --dict DICT --min-count 3", "--min-count and --max-symbols are for a new"),
    ("plain_text --dict DICT --max-symbols 9", "--min-count and --max-symbols are for a new"),
    ("plain_text --dict /dev/null", "--dict /dev/null is not a file"),
    ("plain_text --dict mistyped", "--dict mistyped does not exist"),
    ("plain_text --encoder-json x", "choose the tokens"),
    ("plain_text --train /dev/null", "/dev/null is not a file or folder; give local files"),
    ("plain_text --train EMPTY", "no text in"),
    ("plain_text --train BLANK", "train: no line of its text is left"),
    ("mix --files 0", f"argument --files: {WHOLE} 1, not '0'"),
    ("mix --seed nan", "argument --seed: invalid int value: 'nan'"),
    ("mix --corpus plain BLANK", "has no text"),
    ("mix --corpus plain TEXT TEXT", "text again; name each file once, no links"),
    ("mix --corpus plain TEXT size=0.1B", "draws nothing; give a size= or lines= above 0"),
    ("mix --corpus plain TEXT size=-1B", "size=-1B: write a number of B"),
    (f"mix --corpus plain TEXT size={'9' * 400}GiB", "write a number of B"),
    ("mix --corpus plain TEXT lines=²", "lines= is a whole number of lines or documents, not '²'"),
    ("mix --corpus plain TEXT size=1B size=2B", "size=2B: size= is given twice"),
    ("mix --corpus plain TEXT hold-out=2", "fewer than hold-out"),
    ("mix --corpus plain TEXT hold-out=1", "nothing is left to train on: lower hold-out="),
    ("mix --corpus plain TEXT size=1B", "left to train on: lower hold-out=, or raise size="),
    ("glue --max-tokens 7", f"argument --max-tokens: {WHOLE} 8, not '7'"),
    ("squad --stride 445", "--stride 445: give 1 to 444, as --max-length 512 leaves 444 "),
    ("squad --max-length 10 --max-question 6", "--max-question 6: give 1 to 5, as --max-length"),
    ("squad --max-length 5", "--max-length 5: give 6 or more"),
    ("translation --max-ratio nan", f"--max-ratio: {FINITE}, not 'nan'"),
    ("translation --max-ratio 0.5", f"--max-ratio: {FINITE}, not '0.5'"),
    ("translation --target-lang fr", "--target-lang fr: is the source language too"),
    ("translation --valid a b a", "a b a: a set occurs twice; name each once"),
    ("translation --vocab-size 0", f"argument --vocab-size: {WHOLE} 1, not '0'"),
]


@pytest.mark.parametrize(("call", "message"), NUMBERS, ids=[call[:50] for call, _ in NUMBERS])
def test_a_wrong_setting_is_one_line_with_its_option_and_leaves_nothing(text, call, message):
    place = text.parent
    squads = [write_squad(place / name) for name in ("train.json", "dev.json")]
    (place / "dict.txt").write_text("a 1\n")
    (place / "empty").touch()
    (place / "blank").write_text(" \n\n")
    (place / "pieces30.model").touch()
    pieces = ["--sentencepiece-model", place / "pieces30.model", "--dict", place / "dict.txt"]
    given: dict[str, list[object]] = {
        "plain_text": [*COMMON, *([] if "--train" in call else ["--train", text])],
        "mix": ["--workers", 1, *([] if "--corpus" in call else ["--corpus", "plain", text])],
        "glue": [place, *pieces],
        "squad": ["--train", squads[0], "--valid", squads[1], *pieces],
        "translation": ["files", "--train", "t", "--valid", "v", "--test", "t"],
    }
    before = {path.name for path in place.iterdir()}
    files = {"TEXT": "text", "EMPTY": "empty", "BLANK": "blank", "DICT": "dict.txt"}
    program, *words = call.split()
    more = [place / files[word] if word in files else word for word in words]
    with pytest.raises(UserError) as refused:
        start(program, *given[program], "--out", place / "n", *more)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path.name for path in place.iterdir()} == before


def test_a_new_dictionary_needs_training_text(text):
    with pytest.raises(UserError, match=r"give --train, .* or --dict"):
        start("plain_text", "--valid", text, "--out", text.with_name("n"), *COMMON)


@pytest.mark.parametrize("limit", [1 << 31, 10**30])
def test_limits_that_nothing_reaches(text, limit):
    limits = ["--longest-line", limit, "--max-symbols", limit]
    assert binarize(text, *limits, "--min-count", 1).is_dir()
    write_task(text.parent / "raw", "RTE", {"train": 9, "valid": 5, "test": 4})
    more = ["--sentencepiece-model", write_pieces(text.parent, 30), "--max-tokens", limit]
    out = text.with_name("glue")
    start("glue", text.parent / "raw", "--tasks", "RTE", "--out", out, *more)
    assert (out / "RTE").is_dir()
