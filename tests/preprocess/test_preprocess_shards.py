"""Whole or not at all: shards, interruptions, manifests, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest
import zstandard
from fairseq.data.indexed_dataset import MMapIndexedDataset

from binarize import command, formats, options, pool, shards, sources, split
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running import folders
from tests.helpers.programs import true_start
from tests.helpers.waiting import is_running, wait_until

PROGRAMS = Path(__file__).parents[2] / "preprocess"
FILES = ("train.bin", "train.idx", "dict.txt")


def make_text(path: Path, lines: int = 400, seed: int = 0) -> Path:
    generator = random.Random(seed)
    ends = ["\n", "\n", "\r\n", "\n\n", "\r"]
    words = [f"w{i}" for i in range(50)]
    text = "".join(
        " ".join(generator.choices(words, k=generator.randrange(9))) + generator.choice(ends)
        for _ in range(lines)
    )
    path.write_bytes(text.encode())
    return path


def run(*arguments: object, lines: formats.LineFormat = formats.plain) -> None:
    given = ["--words", "--workers", 1, *arguments]
    command.run(options.make_parser("").parse_args([str(part) for part in given]), lines)


def items(*folders: Path) -> list[list[int]]:
    return [item.tolist() for folder in folders for item in MMapIndexedDataset(f"{folder}/train")]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    return make_text(tmp_path / "text")


@pytest.mark.parametrize(("number", "empty", "workers"), [(2, "keep", 1), (5, "drop", 2)])
def test_shards_together_are_the_whole(tmp_path, text, number, empty, workers):
    second = make_text(tmp_path / "second", seed=1)
    run(
        "--train",
        text,
        second,
        "--out",
        tmp_path / "all",
        "--empty-lines",
        empty,
        "--workers",
        workers,
    )
    dictionary = ["--dict", tmp_path / "all" / "dict.txt", "--empty-lines", empty]
    dictionary += ["--workers", workers]
    for shard in range(number):
        run("--train", text, second, "--valid", text, "--out", tmp_path / "shards",
            *dictionary, "--shard", shard, "--num-shards", number)  # fmt: skip
    folders = sorted((tmp_path / "shards").iterdir())
    assert [folder.name for folder in folders] == [f"shard{k}-of-{number}" for k in range(number)]
    assert items(*folders) == items(tmp_path / "all")
    assert [(folder / "valid.bin").exists() for folder in folders] == [True] + [False] * (
        number - 1
    )
    assert len({(folder / "dict.txt").read_bytes() for folder in folders}) == 1
    sizes = [len(items(folder)) for folder in folders]
    assert max(sizes) < 2 * min(sizes)


def test_thousands_of_files_are_the_text_that_they_make_together(tmp_path):
    whole = make_text(tmp_path / "whole", 1500)
    lines = whole.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(True)
    for number, line in enumerate(lines):
        path = tmp_path / "many" / f"{number // 100:03}" / f"{number:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(line)
    run("--train", whole, "--out", tmp_path / "one")
    dictionary = ["--dict", tmp_path / "one" / "dict.txt"]
    for shard in range(2):
        run("--train", tmp_path / "many", "--out", tmp_path / "two", *dictionary,
            "--shard", shard, "--num-shards", 2)  # fmt: skip
    assert len(lines) > 1500
    # With each file a document ends, too.
    found = [items(tmp_path / "one"), items(*sorted((tmp_path / "two").iterdir()))]
    assert len(found[1]) > len(lines)
    one, two = ([item for item in each if len(item) > 1] for each in found)
    assert one == two


@pytest.fixture(scope="module")
def shards_of_text(tmp_path_factory) -> tuple[Path, Path]:
    """Make a text and a folder of its three shards."""
    folder = tmp_path_factory.mktemp("three")
    text, out = make_text(folder / "text"), folder / "bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", 300)
        run("--train", text, "--out", folder / "one")
        for shard in range(3):
            run("--train", text, "--out", out, "--dict", folder / "one" / "dict.txt",
                "--shard", shard, "--num-shards", 3)  # fmt: skip
    return text, out


def _drop(folders):
    shutil.rmtree(folders[1])


def _double(folders):
    shutil.rmtree(folders[1])
    shutil.copytree(folders[0], folders[1])


def _other_options(folders):
    path = folders[1] / "manifest.json"
    path.write_text(path.read_text().replace('"longest_line": null', '"longest_line": 9'))


def _other_hash(folders):
    path = folders[1] / "manifest.json"
    part = json.loads(path.read_text())["splits"]["train"]["inputs"][0]["sha256"]
    path.write_text(path.read_text().replace(part, part[::-1]))


def _foreign(folders):
    (folders[1] / "manifest.json").write_text('{"plan": {}, "splits": []}')


def _cut(folders):
    with open(folders[1] / "train.bin", "r+b") as file:
        file.truncate(10)


def _grow(folders):
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    with open(manifest["splits"]["train"]["inputs"][0]["path"], "ab") as file:
        file.write(b"w1 w2\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folders: None, ""),
        (_drop, "shard1-of-3 is missing or has no manifest; delete it, and start the same"),
        (_double, "shard1-of-3: has other parts of the text; delete it, and start the same comm"),
        (_other_options, "shard1-of-3: has other options, longest_line: 9, not None; delete it"),
        (_other_hash, "shard1-of-3: has other parts of the text; delete it"),
        (_foreign, "shard1-of-3: was not made by this program; delete it, and start the same comm"),
        (_cut, "shard1-of-3: has other content of train.bin; delete it"),
        (_grow, "text: bytes .* are in no shard or in two: it changed since they were made"),
    ],
)
def test_shards_that_are_not_the_whole_are_named(shards_of_text, tmp_path, damage, message):
    text, made = shards_of_text
    content_before = text.read_bytes()
    folders = sorted(Path(shutil.copytree(made, tmp_path / "bin")).iterdir())
    plan = json.loads((folders[0] / "manifest.json").read_text())["plan"]
    damage(folders)
    try:
        with pytest.raises(UserError, match=message) if message else nullcontext():
            shards.check_coverage(shards.read_shards(folders, plan), [str(text)])
    finally:
        text.write_bytes(content_before)


def test_a_shard_of_another_text_is_told(tmp_path, text):
    parts = [[shards.Input(shards.Part("gone", 0, text.stat().st_size), "")]] * 2
    with pytest.raises(UserError, match="gone is in a shard, but not in --train"):
        shards.check_coverage(parts, [str(text)])


def test_compressed_files_are_dealt_out_whole(tmp_path):
    openers = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
        ".zst": zstandard.open,
        "": open,
    }
    paths = [tmp_path / f"text{number}{suffix}" for number, suffix in enumerate(openers)]
    for number, (path, opener) in enumerate(zip(paths, openers.values())):
        with opener(path, "wb") as file:
            file.write(f"w{number} w{number + 1}\n".encode() * 5)
    run("--train", *paths, "--out", tmp_path / "all")
    assert len(items(tmp_path / "all")) == 5 * 5 + 4  # an empty item between files
    names = [str(path) for path in paths[:4]]
    parts = [shards.parts_of_shard(names, shard, 4) for shard in range(4)]
    assert parts == [[shards.Part(name, 0, os.path.getsize(name))] for name in names]
    with pytest.raises(UserError, match="shard 0 of 5 would be empty"):
        shards.parts_of_shard(names, 0, 5)


def test_only_files_that_are_divided_are_opened_to_find_the_parts(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_text("w\n" * 5)
    opened: list[str] = []

    def note(path: str, mode: str) -> IO[Any]:
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(shards, "open", note, raising=False)
    names = [str(path) for path in paths]
    assert shards.parts_of_shard(names, 1, 2) == [shards.Part(each, 0, 10) for each in names[2:]]
    assert not opened
    assert shards.parts_of_shard(names, 0, 3)[-1] == shards.Part(names[1], 0, 4)
    assert opened == [names[1]]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_damaged_file_is_named(tmp_path, damage, suffix):
    zstd = zstandard.ZstdCompressor(write_checksum=True)  # as the program zstd does
    compress = {"gz": gzip.compress, "zst": zstd.compress}[suffix]
    data = bytearray(compress(make_text(tmp_path / "plain").read_bytes()))
    data = data[:-20] if damage == "cut" else data[:200] + b"\xff\xff\xff" + data[203:]
    path = tmp_path / f"text.{suffix}"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path} is damaged"):
        run("--train", path, "--out", tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_chunks_are_whole_lines_wherever_reading_begins(tmp_path, block, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", block)
    data = b"a\r\nb\n\nc\rd\n\r\nlast"
    (tmp_path / "text").write_bytes(data)
    part = shards.Part(str(tmp_path / "text"), 0, len(data))
    inputs = [shards.Input.from_part(part)]
    *chunks, (last, rest) = sources.read_chunks(inputs, sources.Place())
    assert (last.ends_part, last.lines, rest) == (True, 0, b"")
    texts = [text for _, text in chunks]
    assert b"".join(texts) == data
    assert all(text.endswith(b"\n") for text in texts[:-1])
    with open(tmp_path / "text", encoding="utf-8") as file:
        assert sum(chunk.lines for chunk, _ in chunks) == len(list(file)) == last.end.line
    assert inputs[0].sha256 == hashlib.sha256(data).hexdigest()  # which is checked at the end
    for done, (chunk, _) in enumerate(chunks, start=1):
        again = sources.read_chunks(inputs, chunk.next_place)
        assert b"".join(text for _, text in again) == b"".join(texts[done:])


def test_control_characters_in_the_middle_are_text_to_a_resumed_run_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 8)
    (tmp_path / "text").write_bytes(b"a b c d\ne f \1\2\ng h i j\n")
    inputs = [shards.Input.from_part(shards.Part(str(tmp_path / "text"), 0, 24))]
    chunks = list(sources.read_chunks(inputs, sources.Place()))
    assert len(chunks) == 4
    assert list(sources.read_chunks(inputs, chunks[0][0].next_place)) == chunks[1:]


def test_a_line_without_end_is_no_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "text").write_bytes(b"ok\n" + bytes(3 << 20))
    with pytest.raises(UserError, match=r"text, line 2: more than 1 MiB without an end of line"):
        run("--train", tmp_path / "text", "--out", tmp_path / "bin")


class _InterruptedError(Exception):
    pass


@pytest.mark.parametrize("calls", [2, 23])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, text, calls, monkeypatch):
    """Interrupted after some chunks, with bytes on the disk beyond what was saved."""
    valid = make_text(tmp_path / "valid", 60, seed=2)
    arguments = ["--train", text, valid, "--valid", valid, "--longest-line", 4]
    run(*arguments, "--out", tmp_path / "whole")
    monkeypatch.setattr(folders, "_SECONDS_BETWEEN_SAVES", 0.0)
    original, left = split.Split._append, [0]

    def append(self, given):
        if left[0] == 0:
            self._store.append(b"\x07\x00" * 9, b"\x01\x00\x00\x00" * 9)  # never saved
            self._store.sync()
            raise _InterruptedError
        left[0] -= 1
        original(self, given)

    monkeypatch.setattr(split.Split, "_append", append)
    dest, interruptions = tmp_path / "resumed", 0
    while not dest.exists():
        left[0] = calls + interruptions
        try:
            run(*arguments, "--out", dest)
        except _InterruptedError:
            interruptions += 1
            assert (tmp_path / "resumed.partial").is_dir()
    assert interruptions >= 1
    assert content(dest) == content(tmp_path / "whole")
    assert not (tmp_path / "resumed.partial").exists()


def test_a_run_interrupted_at_the_very_end_goes_on(tmp_path, text, monkeypatch):
    monkeypatch.setattr(folders, "_SECONDS_BETWEEN_SAVES", 0.0)
    run("--train", text, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(split, "describe_file", _interrupt)  # the index is written then
        with pytest.raises(_InterruptedError):
            run("--train", text, "--out", tmp_path / "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(command.WholeFolder, "finish", _interrupt)  # the split is done then
        with pytest.raises(_InterruptedError):
            run("--train", text, "--out", tmp_path / "resumed")
    run("--train", text, "--out", tmp_path / "resumed")
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


def _interrupt(*_: object) -> None:
    raise _InterruptedError


SAVING = """
import sys, time
sys.path.insert(0, {programs!r})
import {name}
from binarize import sources
from fairseq_posenc.workbench.running import folders
from fairseq_posenc.workbench.running.folders import WholeFolder
sources.CHUNK_BYTES = {chunk}
folders._SECONDS_BETWEEN_SAVES = 0.0
sys.argv = ["{name}.py", *{arguments!r}]
{before}
{name}.main()
"""
HALTING = """
save, reached = WholeFolder.save, []
def save_or_halt(folder, done):
    if reached:  # now more is written than is known
        print("halted", flush=True)
        time.sleep(3600)
    save(folder, done)
    reached.extend([done] if {where} else [])
WholeFolder.save = save_or_halt
"""


def saving(name: str, arguments: list[str], chunk: int = 20_000, before: str = "") -> str:
    """Return code that runs a program, which saves its place after each chunk of so many bytes."""
    programs = str(PROGRAMS)
    return SAVING.format(
        programs=programs, name=name, chunk=chunk, arguments=arguments, before=before
    )


def kill_where(where: str, name: str, arguments: list[str], chunk: int) -> list[int]:
    """Kill a program in its first save after one of a place, a condition of what is ``done``.

    Returns:
        The processes that it had begun.
    """
    code = saving(name, arguments, chunk, HALTING.format(where=where))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=true_start(), **pipes) as process:
        assert process.stdout
        assert "halted\n" in process.stdout
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    return [int(child) for child in children]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path):
    text = make_text(tmp_path / "text", 8000)
    arguments = ["--train", str(text), "--words", "--workers", "2", "--out"]
    whole, dest = tmp_path / "whole", tmp_path / "resumed"
    run("--train", text, "--out", whole)
    where = "'place' in done.get('train', {})"
    children = kill_where(where, "plain_text", [*arguments, str(dest)], 20_000)
    assert len(children) == 2
    wait_until(lambda: not any(map(is_running, children)))
    assert not dest.exists()
    progress = tmp_path / "resumed.partial" / "progress.json"
    state = json.loads(progress.read_text())["done"]["train"]
    assert 0 < state["place"][1] < text.stat().st_size
    run("--train", text, "--out", dest)
    assert content(dest) == content(whole)


def test_a_killed_worker_is_told_in_one_line(tmp_path, text, monkeypatch):
    monkeypatch.setattr(command, "make_items", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="a worker process was ended from outside"):
        run("--train", text, "--out", tmp_path / "bin")


def test_few_chunks_are_in_memory(tmp_path):
    read = []

    def chunks():
        for number in range(200):
            read.append(number)
            yield number, b""

    with pool.Pool(2, len) as opened:
        for mark, result in opened.map(chunks()):
            assert result == 0
            assert len(read) - mark <= 2 * pool._PENDING_PER_WORKER


def test_the_manifest_says_what_is_in_the_folder(tmp_path, text):
    run("--train", text, "--out", tmp_path / "bin")
    manifest = json.loads((tmp_path / "bin" / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    for name, output in train["outputs"].items():
        data = (tmp_path / "bin" / name).read_bytes()
        assert output == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    [source] = train["inputs"]
    data = text.read_bytes()
    with open(text, encoding="utf-8") as lines:
        number = len(list(lines))
    expected = {"path": str(text), "start": 0, "end": len(data), "lines": number}
    assert source == {**expected, "sha256": hashlib.sha256(data).hexdigest()}
    found = items(tmp_path / "bin")
    assert train["counts"]["items"] == len(found)
    assert train["counts"]["tokens"] == sum(map(len, found))
    assert train["counts"]["lines"] == number
    assert train["counts"]["unknown_tokens"] == 0
    dictionary = (tmp_path / "bin" / "dict.txt").read_bytes()
    assert manifest["dict.txt"]["sha256"] == hashlib.sha256(dictionary).hexdigest()
    assert set(content(tmp_path / "bin")) == {*FILES, "manifest.json"}


def test_what_is_done_is_not_done_again_and_never_overwritten(tmp_path, text, capsys):
    arguments = ["--train", text, "--out", tmp_path / "bin"]
    run(*arguments)
    before = content(tmp_path / "bin")
    run(*arguments)
    assert "exists already, made from the same inputs" in capsys.readouterr().err
    with pytest.raises(UserError, match="other options, empty_lines: documents, not drop; name"):
        run(*arguments, "--empty-lines", "drop")
    (tmp_path / "by_hand").mkdir()
    with pytest.raises(UserError, match="by_hand: exists, and was not made by"):
        run("--train", text, "--out", tmp_path / "by_hand")
    assert content(tmp_path / "bin") == before


def test_text_that_changed_is_noticed_by_its_content(tmp_path, text):
    arguments = ["--train", text, "--out", tmp_path / "bin"]
    run(*arguments)
    stat = text.stat()
    data = text.read_bytes()
    text.write_bytes(data.replace(b"w1 ", b"w2 ", 1))
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert text.stat().st_size == len(data)
    with pytest.raises(UserError, match="made with other inputs, train; name another folder"):
        run(*arguments)


def test_a_text_that_was_moved_is_the_same_text(tmp_path, text, monkeypatch):
    """Also in the middle: the manifest is that of a run which found everything in its new place."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    text.rename(old / "1")
    make_text(old / "2", seed=1)
    monkeypatch.setattr(folders, "_SECONDS_BETWEEN_SAVES", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(split, "describe_file", _interrupt)
        with pytest.raises(_InterruptedError):
            run("--train", old, "--out", tmp_path / "resumed")
    old.rename(new)
    run("--train", new, "--out", tmp_path / "resumed")
    run("--train", new, "--out", tmp_path / "whole")
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, text, monkeypatch):
    original = split.Split.write

    def write(self, opened):
        text.write_bytes(text.read_bytes().replace(b"w1 ", b"w2 ", 1))
        return original(self, opened)

    monkeypatch.setattr(split.Split, "write", write)
    with pytest.raises(UserError, match="text changed while it was read"):
        run("--train", text, "--out", tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


def test_two_runs_do_not_write_the_same_folder(tmp_path, text):
    told = rf"bin.partial: process {os.getpid()} on .* is running there"
    with folders.lock_folder(tmp_path / "bin.partial"), pytest.raises(UserError, match=told):
        run("--train", text, "--out", tmp_path / "bin")
    run("--train", text, "--out", tmp_path / "bin")


def test_a_dictionary_can_be_made_first(tmp_path, text):
    run("--train", text, "--out", tmp_path / "whole")
    run("--train", text, "--out", tmp_path / "dict", "--dict-only")
    name = "dict.txt"
    assert (tmp_path / "dict" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(UserError, match=r"dict\.txt is there already"):
        run("--train", text, "--out", tmp_path / "dict", "--dict-only")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "nowhere"], "nowhere is not there"),
        (["--train", "EMPTY"], "no text in"),
        (["--train", "BLANK"], "train: no line of its text is left"),
        ([], "nothing to do"),
        (["--train", "TEXT", "--dict", "nowhere"], "--dict nowhere is not there"),
        (["--train", "TEXT", "--dict", "TEXT"], "text: not a fairseq dictionary"),
        (["--valid", "TEXT"], "give --train, which the dictionary is made from"),
        (["--train", "TEXT", "--shard", "2", "--num-shards", "2"], "--shard 2: .* 0 to 1"),
        (["--train", "TEXT", "--num-shards", "2"], "shards need one dictionary"),
        (["--train", "TEXT", "--on", "slurm", "time=9"], "makes all shards: give --num-shards"),
        (
            ["--valid", "TEXT", "--dict", "TEXT", "--num-shards", "2", "--on", "slurm", "time=9"],
            "give --train",
        ),
        (["--train", "TEXT", "--encoder-json", "x"], "choose the tokens"),
        (["--train", "TEXT", "--longest-line", "3"], "give 4 or more"),
        (["--train", "TEXT", "--workers", "0"], "--workers: must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_one_line(tmp_path, arguments, message):
    make_text(tmp_path / "text", 5)
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text(" \n\n")
    names = {"TEXT": "text", "EMPTY": "empty", "BLANK": "blank"}
    given = [str(tmp_path / names[part]) if part in names else part for part in arguments]
    with pytest.raises(UserError, match=message) as raised:
        run(*given, "--out", tmp_path / "bin")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "bin").exists()
