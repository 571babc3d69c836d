"""Data for translation: every source, every complaint, and what fairseq reads in the end."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset, post_process

import translation
from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.subwords import PieceEncoder, Pieces
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.running.options import Parser
from parallel.corpora import read_files, read_iwslt
from tests.helpers.commands import script
from tests.helpers.preprocess import DATA, published, start
from tests.helpers.programs import true_start
from tests.helpers.waiting import wait_until
from translation import choose_pairs, train_model

slow = pytest.mark.slow
WORDS = {
    **{"le": "the", "la": "a", "chat": "cat", "chien": "dog", "mange": "eats", "dort": "sleeps"},
    **{"une": "one", "pomme": "apple", "où": "where", "été": "summer", "déjà": "already"},
}


def sentences(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return sentences in French, and word for word in English."""
    rng = random.Random(seed)
    french = [rng.choices(list(WORDS), k=rng.randint(4, 9)) for _ in range(count)]
    english = [[WORDS[word] for word in words] for words in french]
    return [" ".join(words) + "." for words in french], [" ".join(words) + "." for words in english]


def write(path: Path, lines: list[str]) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_corpus(folder: Path, suffix: str = "", **sets: tuple[list[str], list[str]]) -> Path:
    given = {"train": sentences(60, 0), "valid": sentences(9, 1), "test": sentences(7, 2), **sets}
    for name, sides in given.items():
        for language, lines in zip(("fr", "en"), sides):
            write(folder / f"{name}.{language}{suffix}", lines)
    return folder


def files(folder: Path, out: Path, *more: object) -> list[str]:
    """Return arguments for a corpus written by :func:`write_corpus`; ``more`` overrides them."""
    sets = [part for name in ("train", "valid", "test") for part in (f"--{name}", folder / name)]
    options = ["--vocab-size", 60, "--out", out, "--workers", 1, *more]
    return ["files", *map(str, sets), *map(str, options)]


def make(*arguments: object) -> None:
    start("translation", *arguments)


def texts(data: Path, split: str, language: str, pair: str = "fr-en") -> list[str]:
    """Return a split as fairseq reads it: numbers, then pieces, then text."""
    dictionary = Dictionary.load(str(data / f"dict.{language}.txt"))
    dataset = load_indexed_dataset(str(data / f"{split}.{pair}.{language}"), dictionary)
    return [post_process(dictionary.string(line), "sentencepiece") for line in dataset]


def numbers(data: Path, split: str, language: str, pair: str = "fr-en") -> list[list[int]]:
    dictionary = Dictionary.load(str(data / f"dict.{language}.txt"))
    dataset = load_indexed_dataset(str(data / f"{split}.{pair}.{language}"), dictionary)
    return [line.tolist() for line in dataset]


def manifest(data: Path) -> dict:
    return json.loads((data / "manifest.json").read_text(encoding="utf-8"))


def raw(data: Path, split: str, language: str) -> list[str]:
    return (data / f"{split}.raw.{language}").read_text(encoding="utf-8").split("\n")[:-1]


def assert_same_numbers(data: Path, model: str, language: str) -> None:
    """Assert that fairseq numbers the pieces as sentencepiece does."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / model))
    dictionary = Dictionary.load(str(data / f"dict.{language}.txt"))
    assert dictionary.symbols == [pieces.id_to_piece(i) for i in range(len(pieces))]
    assert dictionary.symbols[:4] == ["<s>", "<pad>", "</s>", "<unk>"]


ABOUT = [
    "<url>http://www.ted.com/talks/{0}</url>",
    "<keywords>talks, {0}</keywords>",
    "<speaker>Somebody</speaker>",
    "<talkid>{0}</talkid>",
    "<title>Somebody: on cats</title>",
    "<description>A talk on cats &amp; dogs.</description>",
]


def talk(number: int, lines: list[str], more: tuple[str, ...] = ()) -> list[str]:
    return [*(line.format(number) for line in ABOUT), *more, *(f" {line}" for line in lines)]


def segments(lines: list[str], first: int = 1) -> list[str]:
    return [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<mteval><refset setid="iwslt2017" srclang="french" trglang="english">',
        '<doc docid="69" genre="lectures">',
        "<talkid>69</talkid>",
        *(f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(lines, first)),
        "</doc>",
        "</refset></mteval>",
    ]


def release(folder: Path, **changed: list[str]) -> Path:
    """Write the files of a release; ``changed`` has other lines for some of them."""
    french, english = sentences(40, 0)
    french[3], english[3] = "", "the cat."  # the published text has such pairs
    french[5], english[5] = "une &amp; une.", "one &amp; one."
    # The two sides have different people to thank, so different numbers of lines.
    translator = ('<translator href="http://x">Somebody Else</translator>', "<reviewer></reviewer>")
    contents = {
        "train.tags.fr-en.fr": talk(1, french[:25], translator) + talk(2, french[25:], translator),
        "train.tags.fr-en.en": talk(1, english[:25]) + talk(2, english[25:]),
    }
    years = ["dev2010", *(f"tst{year}" for year in range(2010, 2016))]
    for seed, name in enumerate(years, start=1):
        for language, lines in zip(("fr", "en"), sentences(5 + seed, seed)):
            lines[0] += " l&apos;été &lt;3 ☃"
            contents[f"IWSLT17.TED.{name}.fr-en.{language}.xml"] = segments(lines)
    for name, lines in {**contents, **changed}.items():
        write(folder / "fr-en" / name, lines)
    return folder


def archive(folder: Path) -> Path:
    path = folder / "fr-en.tgz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder / "fr-en", "fr-en")
    return path


@pytest.fixture(scope="module")
def iwslt(tmp_path_factory):
    """Return a data-bin made of an archive, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("iwslt")
    path = archive(release(folder))
    arguments = ["iwslt17", path, "--vocab-size", 60, "--out", folder / "bin", "--workers", 2]
    arguments += ["--test", *(f"tst{year}" for year in (2015, 2010, 2011, 2012, 2013, 2014))]
    make(*arguments)
    return folder / "bin", arguments


@slow
def test_iwslt_keeps_the_text_and_counts_what_is_left_out(iwslt):
    data, arguments = iwslt
    made = manifest(data)
    french, english = sentences(40, 0)
    french[5], english[5] = "une & une.", "one & one."
    for language, lines in (("fr", french), ("en", english)):
        assert texts(data, "train", language) == lines[:3] + lines[4:]
    results = made["results"]["train"]
    assert (results["read"], results["kept"]) == (40, 39)
    assert results["dropped"] == {"empty": 1, "too long": 0, "lengths too different": 0}
    tags = ["url", "keywords", "speaker", "talkid", "title", "description"]
    assert made["left_out"]["en"] == dict.fromkeys(tags, 2)
    assert made["left_out"]["fr"] == {**made["left_out"]["en"], "translator": 2, "reviewer": 2}
    digest = hashlib.sha256(arguments[1].read_bytes()).hexdigest()
    assert made["plan"]["inputs"] == {"fr-en.tgz": digest}


@slow
def test_iwslt_sets_are_numbered_in_the_order_given_and_untouched(iwslt):
    data, _ = iwslt
    names = {"valid": (1, "dev2010"), "test": (7, "tst2015"), "test1": (2, "tst2010")}
    names |= {f"test{number}": (number + 1, f"tst{2009 + number}") for number in range(2, 6)}
    for split, (seed, name) in names.items():
        assert manifest(data)["results"][split]["set"] == name
        for language, lines in zip(("fr", "en"), sentences(5 + seed, seed)):
            lines[0] += " l'été <3 ☃"
            assert raw(data, split, language) == lines
            # The snowman is not in the training text; all the rest is read as it was written.
            assert texts(data, split, language)[1:] == lines[1:]
            assert manifest(data)["results"][split][language]["unknown"] > 0


@slow
def test_fairseq_and_sentencepiece_number_the_pieces_alike(iwslt):
    data, _ = iwslt
    assert (data / "dict.fr.txt").read_bytes() == (data / "dict.en.txt").read_bytes()
    assert_same_numbers(data, "sentencepiece.model", "fr")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "sentencepiece.model"))
    for line, ids in zip(raw(data, "valid", "fr")[1:], numbers(data, "valid", "fr")[1:]):
        assert ids == [*pieces.encode(line), 2]
        assert pieces.decode(ids[:-1]) == line
    counts = dict(line.rsplit(" ", 1) for line in (data / "dict.fr.txt").read_text().splitlines())
    everything = [i for side in ("fr", "en") for line in numbers(data, "train", side) for i in line]
    for i in range(4, 60):
        assert int(counts[pieces.id_to_piece(i)]) == everything.count(i)


@slow
def test_the_same_again_does_nothing_and_anything_else_is_refused(iwslt, capsys):
    data, arguments = iwslt
    before = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    make(*arguments)
    assert "exists already, made from the same inputs" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"other options, vocab_size: 60, not 61; name another"):
        make(*arguments, "--vocab-size", 61)
    with pytest.raises(UserError, match=r"other options, test: "):
        make(*arguments, "--test", "tst2015")
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == before


def test_iwslts_test_set_is_all_years_and_each_by_itself(tmp_path):
    folder = release(tmp_path)
    translation.add_arguments(parser := Parser())
    args = parser.parse_args(["iwslt17", str(folder), "--out", "bin"])
    corpus = read_iwslt(args.path, ("fr", "en"), args.valid, args.test)
    together, *years = corpus.test
    assert [split.name for split in years] == [f"tst{year}" for year in range(2010, 2016)]
    assert together.name == "tst2010+tst2011+tst2012+tst2013+tst2014+tst2015"
    for side in ("source", "target"):
        lines = [line for split in years for line in getattr(split, side).lines]
        assert getattr(together, side).lines == lines
    assert [len(split.source.lines) for split in corpus.test] == [57, 7, 8, 9, 10, 11, 12]
    assert [split.name for split in corpus.valid] == ["dev2010"]


def test_iwslt_from_a_folder_in_the_other_direction(tmp_path):
    folder = release(tmp_path)
    corpus = read_iwslt(folder, ("en", "fr"), ["dev2010"], ["tst2013+tst2014", "tst2014"])
    english = corpus.train.source
    assert english.lines[1] == f" {sentences(40, 0)[1][1]}"
    assert english.locate(1) == f"{folder}: train.tags.fr-en.en, line 8"
    assert [split.name for split in corpus.test] == ["tst2013+tst2014", "tst2014"]
    assert len(corpus.inputs) == 8


def without(lines: list[str], index: int) -> list[str]:
    return lines[:index] + lines[index + 1 :]


FRENCH_40 = sentences(40, 0)[0]
DEV = sentences(6, 1)[1]
DEV_EN = "IWSLT17.TED.dev2010.fr-en.en.xml"
WRONG_RELEASES = {
    "a line too few": (
        {"train.tags.fr-en.fr": talk(1, FRENCH_40[:25]) + talk(2, FRENCH_40[25:39])},
        r"train.tags.fr-en.en, line 52: no line of the other side .* 39 lines .* 40",
    ),
    "a segment missing": ({DEV_EN: segments(DEV[:5])}, r"fr.xml, line 10: no line of the other"),
    "an empty segment": (
        {DEV_EN: segments([*DEV[:2], "  ", *DEV[3:]])},
        r"en.xml, line 7: empty; lines are never left out of validation",
    ),
    "a segment that goes on": (
        {DEV_EN: ["<doc >", '<seg id="1"> the cat', "sleeps </seg>"]},
        r"en.xml, line 2: a segment must be <seg .* on a line of its own",
    ),
    "two segments on a line": (
        {DEV_EN: ['<seg id="1">a</seg><seg id="2">b</seg>']},
        r"en.xml, line 1: a segment must be <seg id",
    ),
    "no segments": ({DEV_EN: ["<doc>", "</doc>"]}, r"en.xml: contains no <seg>"),
}


@pytest.mark.parametrize("case", WRONG_RELEASES)
def test_wrong_releases(case, tmp_path):
    changed, message = WRONG_RELEASES[case]
    with pytest.raises(UserError, match=message):
        make("iwslt17", release(tmp_path, **changed), "--out", tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


def test_wrong_archives(tmp_path):
    path = archive(release(tmp_path))
    for words, fault in (
        ("--test tst2016", "has no IWSLT17.TED.tst2016.fr-en.fr.xml; its sets: IW"),
        ("--test tst2010+tst2010", "tst2010: a set occurs twice; name each once"),
        ("--source-lang de", "has no train.tags.de-en.de;"),
    ):
        with pytest.raises(UserError, match=fault):
            make("iwslt17", path, *words.split(), "--out", tmp_path / "bin")
    for content, reason in ((path.read_bytes()[:2000], ".*"), (b"x", "file .* opened success.*")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"fr-en.tgz: not a whole .tgz archive \({reason}\);"):
            make("iwslt17", path, "--out", tmp_path / "bin")
    with pytest.raises(UserError, match=r"none.tgz: no such file"):
        make("iwslt17", tmp_path / "none.tgz", "--out", tmp_path / "bin")


@slow
def test_files_with_spaces_of_all_kinds(tmp_path):
    french, english = sentences(60, 0)
    french[7] = english[7] = "a\u00a0cat  \u2028 dog\t."  # spaces of all kinds
    english[9] = " ".join(english[:9])
    write_corpus(tmp_path, ".gz", train=(french, english))
    out = tmp_path / "new" / "bin"
    make(*files(tmp_path, out, "--max-ratio", 5))
    results = manifest(out)["results"]["train"]
    assert results["dropped"] == {"empty": 0, "too long": 0, "lengths too different": 1}
    assert texts(out, "train", "fr")[7] == "a cat dog ."
    assert texts(out, "train", "en") == [" ".join(line.split()) for line in without(english, 9)]
    for language, lines in zip(("fr", "en"), sentences(7, 2)):
        assert texts(out, "test", language) == raw(out, "test", language) == lines
        assert_same_numbers(out, "sentencepiece.model", language)
    assert {path.name for path in out.iterdir() if path.suffix not in (".bin", ".idx")} == {
        *("dict.fr.txt", "dict.en.txt", "manifest.json", "request.json"),
        "sentencepiece.model",
        *(f"{split}.raw.{language}" for split in ("valid", "test") for language in ("fr", "en")),
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["bin"]


WRONG_FILES = {
    "not UTF-8": ("train.en", b"cat\n\xe9t\xe9\n", r"train.en, line 2: byte 0xe9 is not UTF-8"),
    "cut in a character": ("test.fr", b"a\nb\n\xc3", r"test.fr, line 3: byte 0xc3 is not UTF-8"),
    "binary": ("valid.fr", b"cat\n\n\0dog\n", r"valid.fr, line 3: a NUL byte"),
    "old line ends": ("valid.fr", b"cat\ndog\rcow\n", r"valid.fr, line 2: a carriage return"),
    "no text": ("train.fr", b"\n \n", r"train.fr: the file is empty"),
    "a side empty": ("test.en", b"cat\n \n" + 5 * b"dog\n", r"test.en, line 2: empty; .* left out"),
    "too few lines": ("train.en", b"cat\n", r"train.fr, line 2: no line .* 60 lines .* 1;"),
    "too many lines": ("test.en", b"cat\n" * 8, r"test.en, line 8: no line of the other side"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files(case, tmp_path):
    name, content, message = WRONG_FILES[case]
    write_corpus(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        make(*files(tmp_path, tmp_path / "bin"))
    assert not (tmp_path / "bin").exists()


def test_files_that_cannot_be_read(tmp_path):
    write_corpus(tmp_path)
    write(tmp_path / "test.en.gz", ["cat"])
    with pytest.raises(UserError, match=r"test.en and .*test.en.gz both exist; remove the one"):
        make(*files(tmp_path, tmp_path / "bin"))
    (tmp_path / "test.en").unlink()
    packed = tmp_path / "test.en.gz"
    for content in (packed.read_bytes()[:-9], b"cat\n"):
        packed.write_bytes(content)
        with pytest.raises(UserError, match=r"test.en.gz: cannot be read \("):
            make(*files(tmp_path, tmp_path / "bin"))
    packed.unlink()
    with pytest.raises(UserError, match=r"neither .*test.en nor .*test.en.gz exists; check name"):
        make(*files(tmp_path, tmp_path / "bin"))


def test_windows_files_are_read_as_others(tmp_path):
    write_corpus(tmp_path)
    lines = b"\xef\xbb\xbf" + b"\r\n".join(f"chat {number}".encode() for number in range(7))
    (tmp_path / "test.fr").write_bytes(lines)
    train, valid, test = (tmp_path / name for name in ("train", "valid", "test"))
    corpus = read_files(train, [valid], [test], ("fr", "en"))
    assert corpus.test[0].source.lines == [f"chat {number}" for number in range(7)]


@slow
@published
def test_multi30k(tmp_path):
    names = {"train": ("train", 800), "valid": ("val", 50), "test": ("test_2016_flickr", 40)}
    for split, (name, count) in names.items():
        for language in ("fr", "en"):
            content = gzip.decompress((DATA / "multi30k" / f"{name}.{language}.gz").read_bytes())
            write(tmp_path / f"{split}.{language}.gz", content.decode().split("\n")[:count])
    out = tmp_path / "bin"
    make(*files(tmp_path, out, "--vocab-size", 600, "--workers", 2))
    results = manifest(out)["results"]
    assert [results[split]["read"] for split in ("train", "valid", "test")] == [800, 50, 40]
    assert_same_numbers(out, "sentencepiece.model", "en")
    for split in ("valid", "test"):
        for language in ("fr", "en"):
            read, given = texts(out, split, language), raw(out, split, language)
            known = [index for index, line in enumerate(read) if "<unk>" not in line]
            assert len(known) > 0.9 * len(given)
            assert [read[i] for i in known] == [" ".join(given[i].split()) for i in known]


def test_pieces_joined_are_the_text(tmp_path):
    french, english = sentences(60, 0)
    strange = ["<s> </s> <pad> <unk>", "½ … ﬁ é e\u0301 «\u202fça\u202f» > 2/3 < 1", "kp"]
    lines = [*french, *english, *strange]
    (tmp_path / "model").write_bytes(train_model(lines, 90, 2))
    pieces = Pieces(tmp_path / "model")
    again = train_model(lines, 90, 2)  # training is deterministic
    processor = sentencepiece.SentencePieceProcessor(model_proto=again)
    spaced = [" ".join(line.split()) for line in lines]
    tokens, sizes = PieceEncoder(pieces, pieces.build_dictionary()).encode(spaced)
    encoded = [item[:-1].tolist() for item in np.split(tokens, np.cumsum(sizes)[:-1])]
    assert [processor.decode(ids) for ids in encoded] == spaced
    assert min(min(ids) for ids in encoded) > 3  # no special symbol comes out of text


def test_vocabularies_that_the_text_cannot_have():
    french, _ = sentences(60, 0)
    for size, said in ((10**12, r" too high .*<= (\d+)"), (9, r" smaller .* 9 vs (\d+)")):
        with pytest.raises(UserError) as printed:
            train_model(french, size, 1)
        (possible,) = re.findall(f"^--vocab-size {size}: .*{said}", str(printed.value))
        assert len(train_model(french, int(possible), 1)) > 0
    for lines, size, said in ((french, 1, "--vocab-size 1: too few for"), ([], 9, "sentencepiece")):
        with pytest.raises(UserError, match=f"^{said}"):
            train_model(lines, size, 1)


def test_filters_count_what_they_drop():
    lengths = [(3, 4), (0, 4), (4, 0), (0, 0), (9, 10), (9, 11), (11, 9), (2, 6), (2, 7), (7, 2)]
    source, target = np.array(lengths).T
    is_kept, dropped = choose_pairs(source, target, 10, 3.0)
    assert [pair for pair, keep in zip(lengths, is_kept) if keep] == [(3, 4), (9, 10), (2, 6)]
    assert dropped == {"empty": 3, "too long": 2, "lengths too different": 2}


def test_filters_that_leave_nothing(tmp_path):
    write_corpus(tmp_path)
    message = r"0 pairs of 60 kept \(dropped: 60 too long\), so there is nothing to train on"
    with pytest.raises(UserError, match=message):
        make(*files(tmp_path, tmp_path / "bin", "--max-length", 1))
    assert not list(tmp_path.glob("*bin*"))


@slow
def test_a_stopped_run_keeps_what_was_finished(tmp_path):
    data = write_corpus(tmp_path / "text", train=sentences(4_000, 0))
    out = tmp_path / "out" / "bin"
    program = [script("fairseq-posenc"), "preprocess", "translation", *files(data, out)]
    process = subprocess.Popen(program, env=true_start())
    model = out.with_name("bin.partial") / "sentencepiece.model"
    try:
        wait_until(model.with_name("manifest.json").exists, process)
    finally:
        process.terminate()
    assert process.wait() == STOPPED
    assert not out.exists()
    learned = model.stat().st_mtime_ns
    make(*files(data, out))
    assert (out / model.name).stat().st_mtime_ns == learned
    make(*files(data, tmp_path / "again"))
    one, other = (folder / "train.fr-en.fr.bin" for folder in (out, tmp_path / "again"))
    assert one.read_bytes() == other.read_bytes()
