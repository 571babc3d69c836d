"""preprocess/mix.py: corpora drawn from by chance, mixed, and exactly so much held out."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest

import mix
from binarize import sources
from binarize.output import open_at
from fairseq_posenc.errors import UserError
from mix import Sampler, measure, parse_corpus, parse_size
from tests.helpers.preprocess import start


def document(number: int, lines: int) -> str:
    words = [f"document {number} line {line} {'word ' * (line % 5)}" for line in range(lines)]
    return "\n".join([*words, ""])


def make_text(path: Path, count: int = 200, seed: int = 0) -> list[str]:
    """Write documents and return them, each line as it will be: without white space at its end."""
    generator = random.Random(seed)
    found = [document(number, generator.randint(1, 9)) for number in range(count)]
    path.write_text("\n".join(found), encoding="utf-8")
    return ["".join(f"{line.strip()}\n" for line in each.splitlines()) for each in found]


def run(*arguments: object) -> None:
    start("mix", "--workers", 1, *arguments)


def documents(path: Path) -> list[str]:
    return [f"{each}\n" for each in path.read_text(encoding="utf-8").split("\n\n") if each]


def train(folder: Path) -> list[str]:
    return [each for path in sorted((folder / "train").iterdir()) for each in documents(path)]


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)


def test_so_many_documents_are_held_out_by_the_seed_and_no_text_is_lost(tmp_path, monkeypatch):
    texts = make_text(tmp_path / "text")
    held = {}
    for seed in (1, 2):
        out = tmp_path / f"seed{seed}"
        given = ["--corpus", "plain", tmp_path / "text", "hold-out=34", "--files", 3]
        run(*given, "--seed", seed, "--out", out)
        held[seed] = documents(out / "valid.txt")
        assert len(held[seed]) == 34
        assert sorted(held[seed] + train(out)) == sorted(texts)
        sizes = [len(documents(path)) for path in (out / "train").iterdir()]
        assert max(sizes) - min(sizes) <= 1
    assert held[1] != held[2]


def draw_sentences(folder: Path, monkeypatch, *wanted: str) -> tuple[list[str], list[str]]:
    """Mix 70 documents of three sentences; return the sentences held out, and those drawn."""
    (folder / "text").write_text("".join(f"One {n}. Two {n}! Three {n}?\n\n" for n in range(70)))
    given = ["--corpus", "plain", folder / "text", *wanted, "--files", 1]
    run(*given, "--sentences", "--unit", "lines", "--out", folder / "out")
    held = (folder / "out" / "valid.txt").read_text().splitlines()
    return held, "".join(train(folder / "out")).splitlines()


def test_so_many_sentences_are_held_out(tmp_path, monkeypatch):
    held, kept = draw_sentences(tmp_path, monkeypatch, "hold-out=50")
    assert len(held) == 50
    assert len(kept) == 3 * 70 - 50
    forms = ("One {}.", "Two {}!", "Three {}?")
    assert {*held, *kept} == {form.format(n) for form in forms for n in range(70)}
    assert len({line.split()[1] for line in held}) > 30  # from everywhere


def test_a_corpus_is_drawn_to_a_size(tmp_path, monkeypatch):
    texts = make_text(tmp_path / "text")
    wanted = 8 << 10
    given = ["--corpus", "plain", tmp_path / "text", "size=8KiB", "hold-out=20", "--files", 2]
    run(*given, "--out", tmp_path / "out")
    drawn, held = train(tmp_path / "out"), documents(tmp_path / "out" / "valid.txt")
    written = sum(path.stat().st_size for path in (tmp_path / "out" / "train").iterdir())
    assert abs(written - wanted) <= max(map(len, texts)) + 1
    assert len(held) == 20
    assert not set(drawn) & set(held)
    assert set(drawn) | set(held) < set(texts)
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["corpora"]["0"]["drawn"]
    assert counts["train_bytes"] == written
    assert (counts["documents"], counts["held_out"]) == (200, 20)


def test_a_corpus_is_drawn_to_a_number_of_sentences(tmp_path, monkeypatch):
    held, drawn = draw_sentences(tmp_path, monkeypatch, "lines=90", "hold-out=30")
    assert len(held) == 30
    assert abs(len(drawn) - 90) <= 3  # whole documents, of three sentences at most
    assert not set(drawn) & set(held)
    assert len({line.split()[1].rstrip(".!?") for line in drawn}) > 25  # from everywhere
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["corpora"]["0"]["drawn"]
    assert counts["train_lines"] == len(drawn)


@pytest.mark.parametrize("hold_out", [0, 30])
def test_long_and_late_documents_have_the_same_chance_as_others(hold_out):
    sizes = [10, 10, 400, 10, 100, 10] * 20
    every = [(f"{n}".encode() * size)[:size] + b"\n" for n, size in enumerate(sizes, 100)]
    there = sum(map(measure, every), Counter())
    wanted = there["bytes"] // 3
    corpus = parse_corpus(["plain", "x", f"size={wanted}B", f"hold-out={hold_out}"])
    drawn, held, rounds = Counter(), Counter(), 500
    for seed in range(rounds):
        sampler = Sampler(corpus, str(seed), "documents", there)
        for number, each in enumerate(every):
            train_text, held_text = sampler.sample(each)
            drawn[number] += bool(train_text)
            held[number] += bool(held_text)
        assert sampler.counts["held_out"] == hold_out
        assert abs(sampler.counts["train_bytes"] - wanted) <= 3 * 402
    for few in (range(2, 120, 6), range(4, 120, 6), range(0, 120, 6), range(30), range(90, 120)):
        mean = sum(drawn[number] for number in few) / len(few) / rounds
        assert mean == pytest.approx(1 / 3, abs=0.03)
        held_out = sum(held[number] for number in few) / len(few) / rounds
        assert held_out == pytest.approx(hold_out / 120, abs=0.02)


def test_corpora_of_several_kinds_are_mixed_as_stated(tmp_path, monkeypatch):
    kinds = ["Pile-CC", "OpenWebText2", "Books3"]
    drawn = [(number, kinds[number % 3]) for number in range(300)]
    records = [{"text": f"{kind} {n}\nend", "meta": {"pile_set_name": kind}} for n, kind in drawn]
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    pile = tmp_path / "pile"
    pile.mkdir()
    for number in range(2):
        (pile / f"0{number}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[number::2])))
    (tmp_path / "wiki").write_text("<doc id=1>\nwiki 1\n</doc>\n<doc id=2>\nwiki 2\n</doc>\n")
    given = [
        *("--corpus", "json", pile, "where=meta.pile_set_name=Pile-CC", "size=640B"),
        *("--corpus", "json", pile, "where=meta.pile_set_name=Books3", "size=430B"),
        *("--corpus", "wikipedia", tmp_path / "wiki"),
    ]
    run(*given, "--files", 2, "--out", tmp_path / "out")
    found = Counter()
    for each in train(tmp_path / "out"):
        found[each.split()[0]] += len(each) + 1
    assert found["wiki"] == 16
    assert found["Pile-CC"] == pytest.approx(640, abs=20)
    assert found["Books3"] == pytest.approx(430, abs=20)
    assert found.keys() == {"wiki", "Pile-CC", "Books3"}
    for path in (tmp_path / "out" / "train").iterdir():
        assert {each.split()[0] for each in documents(path)} == found.keys()


class _InterruptedError(Exception):
    pass


@pytest.mark.parametrize("calls", [3, 40])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch, calls):
    """Also when its text has moved, and with bytes on the disk beyond what was saved."""
    (tmp_path / "old").mkdir()
    for number in range(2):
        make_text(tmp_path / "old" / str(number), 60, number)
    make_text(tmp_path / "other", 30, 2)
    given = ["size=5KiB", "hold-out=20", "--corpus", "plain", tmp_path / "other", "hold-out=9"]
    given += ["--unit", "lines", "--files", 3]
    run("--corpus", "plain", tmp_path / "old", *given, "--out", tmp_path / "whole")
    original, left = mix.map_chunks, [0]

    def read(*given):
        for result in original(*given):
            if left[0] == 0:
                for path in (tmp_path / "resumed.partial").rglob("*.txt"):
                    path.write_bytes(path.read_bytes() + b"never saved")
                raise _InterruptedError
            left[0] -= 1
            yield result

    monkeypatch.setattr(mix, "map_chunks", read)
    corpus, interruptions = tmp_path / "old", 0
    while not (tmp_path / "resumed").exists():
        left[0] = calls + interruptions
        try:
            run("--corpus", "plain", corpus, *given, "--out", tmp_path / "resumed")
        except _InterruptedError:
            interruptions += 1
            corpus = corpus.rename(tmp_path / f"moved{interruptions}")
    assert interruptions >= 1
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


@pytest.mark.parametrize("name", ["text", "missing"])
def test_a_file_that_has_lost_bytes_is_not_filled_with_zeros(tmp_path, name):
    (tmp_path / "text").write_bytes(b"1234")
    with pytest.raises(UserError, match=f"{name} has lost bytes since it was saved: delete"):
        open_at(tmp_path / name, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latex", "TEXT"], r"--corpus latex .*: give a format \(plain, json, wikipedia, wiki"),
        (["plain"], "--corpus plain: give a format"),
        (["plain", "nowhere"], "nowhere does not exist; give local files"),
        (["plain", "TEXT", "size=64GB"], "size=64GB: write a number of B, KiB, MiB, GiB, as in"),
        (["plain", "TEXT", "hold-out=-1"], "hold-out= is a whole number of lines or documents"),
        (["plain", "TEXT", "size=1KiB", "lines=9"], "give size= or lines=, not both"),
        (["plain", "TEXT", "lines=many"], "lines= is a whole number of lines or documents"),
        (["plain", "TEXT", "lines=9999"], r"has only \d+ lines to draw from, less than the 9,999"),
        (["plain", "TEXT", "where=a=b"], "field= and where= are for json"),
        (["json", "TEXT", "where=a"], "where a: write FIELD=VALUE"),
        (["plain", "TEXT", "hold-out=201"], "has 200 documents, fewer than hold-out"),
        (["plain", "TEXT", "size=1GiB"], r"has only \d+,\d+ bytes to draw from, less than"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_blocks_nothing(tmp_path, monkeypatch, words, message):
    make_text(tmp_path / "text")
    given = [tmp_path / "text" if word == "TEXT" else word for word in words]
    with pytest.raises(UserError, match=message) as printed:
        run("--corpus", *given, "--out", tmp_path / "out")
    assert "\n" not in str(printed.value)
    run("--corpus", "plain", tmp_path / "text", "--out", tmp_path / "out")
    assert (tmp_path / "out").is_dir()


def test_sizes():
    assert (parse_size("64GiB"), parse_size("1.5KiB")) == (64 << 30, 1536)
