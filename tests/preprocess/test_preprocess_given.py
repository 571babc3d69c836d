"""What preprocessing is given: dictionaries, texts in UTF-16, and numbers as options."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import load_dictionary
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


# ------------------------------------------------------------------------------------- dictionaries


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
        squads = [write_squad(place / name, name[0]) for name in ("train.json", "dev.json")]
        start(program, *more, "--train", squads[0], "--valid", squads[1])
    [found] = {path.read_bytes() for path in (place / "n").rglob("dict.txt")
               if path.parent.name != "label"}  # fmt: skip
    assert found == content
    assert Dictionary.load(str(place / "dict.txt")).symbols[4:]


FAULTY = {
    "mark": (b"\xef\xbb\xbfa 1\nold 2\n", r"--dict .*dict.txt, line 1: begins with a byte-order"),
    "tab": (
        b"a 1\nold\t2\n",
        r"dict.txt: not a fairseq .* \(line 2: 'old\\t2' is not a word, a sp",
    ),
    "no count": (b"a 1\nold 2\ntree\n", r"dict.txt: not .* \(line 3: 'tree' is not a word"),
    "no number": (b"a 1\nold many\n", r"\(line 2: 'old many' is not a word, a space and its"),
    "fraction": (b"a 1.5\n", r"\(line 1: 'a 1.5' is not"),
    "empty line": (b"a 1\n\nold 2\n", r"\(line 2: '' is not"),
    "twice": (b"a 1\r\nold 2\r\na 3\r\n", r"\(Duplicate word in line 3: 'a 3'\)"),
    "special": (b"a 1\n</s> 3\n", r"\(Duplicate word in line 2: '</s> 3'\)"),
    "not UTF-8": (b"a 1\rold 2\rt\xe9 3\r", r"\(line 3: byte 0xe9 is not UTF-8\)"),
    "UTF-16": ("a 1\nold 2\n".encode("utf-16"), r"\(line 1: byte 0xff is not UTF-8\)"),
    "UTF-16 without a mark": ("a 1\nold 2\n".encode("utf-16-le"), r"\(line 1: .* is not a word"),
    "long line": (b"a 1\n" + b"x" * 5000, r"\(line 2: 'x+\.\.\. \(5,000 characters\)' is not"),
    "nothing": (b"", r"dict.txt holds no symbol"),
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


def test_a_folder_in_the_place_of_a_dictionary(tmp_path):
    with pytest.raises(UserError, match=r"not a fairseq dictionary \(Is a directory\)"):
        load_dictionary(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x 1\ny 2\n", "warning: train: 108 of 108 tokens are <unk>; is the dictionary that of"),
        ("".join(f"{word} 1\n" for word in WORDS[:5]), "warning: train: 63 of 108 tokens are"),
        ("".join(f"{word} 1\n" for word in WORDS[:6]), ""),
        ("".join(f"{word}  1\n" for word in WORDS), "12 of its words have white space in them, as"),
    ],
    ids=["all", "most", "half", "spaces"],
)
def test_a_text_that_the_dictionary_does_not_know_is_told(text, content, said, capsys):
    text.with_name("dict.txt").write_text(content)
    binarize(text, "--dict", text.with_name("dict.txt"))
    told = capsys.readouterr().err
    assert said in told
    assert ("warning" in told) == bool(said)


@pytest.mark.parametrize("program", ["glue", "squad"])
def test_tasks_that_the_dictionary_does_not_know_are_told(tmp_path, program, capsys):
    (tmp_path / "dict.txt").write_text("x 1\n")
    more = ["--dict", tmp_path / "dict.txt", "--sentencepiece-model", write_pieces(tmp_path, 30)]
    if program == "glue":
        write_task(tmp_path / "raw", "RTE", {"train": 9, "valid": 5, "test": 4})
        start(program, tmp_path / "raw", "--tasks", "RTE", *more, "--out", tmp_path / "n")
    else:
        squads = [write_squad(tmp_path / name, name[0]) for name in ("train.json", "dev.json")]
        files = ["--train", squads[0], "--valid", squads[1]]
        start(program, *files, *more, "--out", tmp_path / "n")
    told = [line for line in capsys.readouterr().err.splitlines() if "tokens are <unk>" in line]
    assert len(told) == {"glue": 3, "squad": 2}[program]


# -------------------------------------------------------------------------------------------- texts

SCRIPTS = {
    "Latin": "The quick brown fox jumps over the lazy dog.\n",
    "Cyrillic": "Съешь же ещё этих мягких французских булок\n",
    "Arabic": "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ\n",
    "Devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा\n",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า\n",
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_wide_characters_without_a_mark_are_refused_though_they_are_utf8(text, script, encoding):
    content = (SCRIPTS[script] * 9).encode(encoding)
    content.decode("utf-8")  # valid, all the same
    text.write_bytes(content)
    with pytest.raises(
        UserError, match=r"text: .* are NUL or other control .*, as in UTF-16; save"
    ):
        binarize(text)
    assert [path.name for path in text.parent.iterdir()] == ["text"]


@pytest.mark.parametrize("more", [[], ["--invalid-lines", "skip"], ["--dict-only"]])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_wide_characters_are_refused_however_a_text_is_read(text, encoding, more):
    good = text.with_name("good")
    good.write_text(SCRIPTS["Latin"])
    text.write_bytes((SCRIPTS["Latin"] * 9).encode(encoding))
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


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_some_control_characters_are_text(text, scripts):
    text.write_text(f"{SCRIPTS[scripts] * 9}\x00 \x1b[1m bold \x07\n", encoding="utf-8")
    assert binarize(text).is_dir()


# ------------------------------------------------------------------------------------------ numbers

WHOLE = "must be a whole number of at least 1"
NO_INT = "invalid int value"
NUMBERS = [
    ("plain_text --min-count -1", "--min-count -1: give 0 or more"),
    *((f"plain_text --max-symbols {n}", f"--max-symbols {n}: give 5 or") for n in (-2, 0, 1, 4)),
    *((f"plain_text --longest-line {n}", f"--longest-line {n}: give 4 or") for n in (-1, 0, 3)),
    *(
        (f"plain_text {option} {n}", f"argument {option}: {WHOLE}, not '{n}'")
        for option in ("--workers", "--num-shards")
        for n in ("-1", "0", "nan", "1.5")
    ),
    *(
        (f"plain_text {option} {n}", f"argument {option}: {NO_INT}: '{n}'")
        for option in ("--min-count", "--max-symbols", "--longest-line", "--shard")
        for n in ("nan", "inf", "1e3")
    ),
    ("plain_text --shard -1", "--shard -1: shards are numbered 0 to 0"),
    ("plain_text --shard 2 --num-shards 2", "--shard 2: shards are numbered 0 to 1"),
    ("plain_text --long-lines skip", "--long-lines skip: give --longest-line"),
    ("mix --files 0", f"argument --files: {WHOLE}, not '0'"),
    ("mix --seed nan", f"argument --seed: {NO_INT}: 'nan'"),
    *(
        (f"mix --corpus plain TEXT {setting}", message)
        for setting, message in [
            ("size=0B", "draws nothing; give a size= or lines= above 0"),
            ("size=0.1B", "draws nothing"),
            ("size=-1B", "size=-1B: write a number of B"),
            ("size=nanB", "size=nanB: write a number of B"),
            (f"size={'9' * 400}GiB", "write a number of B"),
            ("lines=0", "draws nothing"),
            ("lines=-1", "lines= is a whole number of lines or documents, not '-1'"),
            ("lines=²", "lines= is a whole number of lines or documents, not '²'"),
            ("hold-out=nan", "hold-out= is a whole number of lines or documents, not 'nan'"),
            ("hold-out=2", "less than hold-out="),
            ("hold-out=1", "nothing is left to train on: hold-out= takes all"),
        ]
    ),
    *((f"glue --max-tokens {n}", f"--max-tokens {n}: give 8 or more") for n in (-1, 0, 7)),
    ("glue --max-tokens nan", f"argument --max-tokens: {NO_INT}: 'nan'"),
    *((f"squad --max-length {n}", f"--max-length {n}: give 6 or more") for n in (-1, 0, 5)),
    *(
        (f"squad --max-question {n}", f"--max-question {n}: give 1 to 507, as --max-length 512")
        for n in (-1, 0, 508)
    ),
    *(
        (f"squad --stride {n}", f"--stride {n}: give 1 to 444, as --max-length 512 leaves 444 ")
        for n in (-1, 0, 445)
    ),
    ("squad --max-length 64", "--max-question 64: give 1 to 59, as --max-length 64 leaves"),
    ("squad --max-length 160", "--stride 128: give 1 to 92, as --max-length 160 leaves 92"),
    ("squad --stride nan", f"argument --stride: {NO_INT}: 'nan'"),
    *(
        (f"translation --max-ratio={n}", f"--max-ratio: must be a finite number, not '{n}'")
        for n in ("nan", "inf", "-inf", "1e999", "x")
    ),
    *((f"translation --max-ratio {n}", f"--max-ratio {n}: give 1 or") for n in (-1, 0, 0.5)),
    *(
        (f"translation {option} 0", f"argument {option}: {WHOLE}, not '0'")
        for option in ("--vocab-size", "--max-length", "--workers")
    ),
]


@pytest.mark.parametrize(("call", "message"), NUMBERS, ids=[call[:50] for call, _ in NUMBERS])
def test_a_number_that_means_nothing_is_refused_by_its_own_option(text, call, message):
    place = text.parent
    squads = [write_squad(place / name) for name in ("train.json", "dev.json")]
    (place / "dict.txt").write_text("a 1\n")
    (place / "pieces30.model").touch()
    pieces = ["--sentencepiece-model", place / "pieces30.model", "--dict", place / "dict.txt"]
    given: dict[str, list[object]] = {
        "plain_text": ["--train", text, *COMMON],
        "mix": ["--workers", 1, *["--corpus", "plain", text] * ("--corpus" not in call)],
        "glue": [place, *pieces],
        "squad": ["--train", squads[0], "--valid", squads[1], *pieces],
        "translation": ["files", "--train", "t", "--valid", "v", "--test", "t"],
    }
    before = {path.name for path in place.iterdir()}
    program, *more = call.replace("TEXT", str(text)).split()
    with pytest.raises(UserError) as refused:
        start(program, *given[program], "--out", place / "n", *more)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path.name for path in place.iterdir()} == before


def test_a_shard_without_text_is_refused(text):
    (text.with_name("dict.txt")).write_text("a 1\n")
    more = ["--dict", text.with_name("dict.txt"), "--shard", 1, "--num-shards", 2, *COMMON]
    with pytest.raises(UserError, match=r"--shard 1: give --train; only shard 0 has the sets"):
        start("plain_text", "--valid", text, "--out", text.with_name("n"), *more)


@pytest.mark.parametrize("limit", [1 << 31, 10**30])
def test_limits_that_nothing_reaches(text, limit):
    assert binarize(
        text, "--longest-line", limit, "--max-symbols", limit, "--min-count", 1
    ).is_dir()
    write_task(text.parent / "raw", "RTE", {"train": 9, "valid": 5, "test": 4})
    more = ["--sentencepiece-model", write_pieces(text.parent, 30), "--max-tokens", limit]
    out = text.with_name("glue")
    start("glue", text.parent / "raw", "--tasks", "RTE", "--out", out, *more)
    assert (out / "RTE").is_dir()


def test_limits_of_a_new_dictionary_beside_a_given_one_are_told(text, capsys):
    text.with_name("dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    binarize(text, "--dict", text.with_name("dict.txt"), "--min-count", 3)
    assert "note: --min-count and --max-symbols limit a new dictionary" in capsys.readouterr().err


def test_a_corpus_without_text_is_named(text):
    text.with_name("blank").write_text("\n \n")
    corpora = ["--corpus", "plain", text, "--corpus", "plain", text.with_name("blank")]
    with pytest.raises(UserError, match=r"--corpus plain .*blank: has no text"):
        start("mix", "--workers", 1, "--out", text.with_name("n"), *corpora)
