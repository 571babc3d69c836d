"""Files of all kinds, kills, manifests, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import signal
from pathlib import Path

import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset

from binarize import command, formats, pool, sources
from fairseq_posenc import folders
from fairseq_posenc.errors import UserError
from tests.helpers.commands import kill_command
from tests.helpers.preprocess import binarize, start
from tests.helpers.programs import true_start

FILES = ("train.bin", "train.idx", "dict.txt")


def make_text(path: Path, lines: int = 400, seed: int = 0) -> Path:
    generator = random.Random(seed)
    ends = ["\n", "\n", "\r\n", "\n\n", "\r"]
    words = [f"w{i}" for i in range(50)]
    text = "".join(
        " ".join(generator.choices(words, k=generator.randrange(9))) + generator.choice(ends)
        for _ in range(lines)
    )
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    return path


def run(*arguments: object, lines: formats.LineFormat = formats.plain) -> None:
    binarize(lines, "--words", *arguments)


def items(folder: Path) -> list[list[int]]:
    return [item.tolist() for item in MMapIndexedDataset(f"{folder}/train")]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    return make_text(tmp_path / "text")


def test_many_files_are_the_text_that_they_make_together(tmp_path):
    whole = make_text(tmp_path / "whole", 120)
    lines = whole.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(True)
    for number, line in enumerate(lines):
        path = tmp_path / "many" / f"{number // 50:03}" / f"{number:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(line)
    run("--train", whole, "--out", tmp_path / "one")
    run("--train", tmp_path / "many", "--out", tmp_path / "two")
    assert len(lines) > 120
    # With each file a document ends, too.
    found = [items(tmp_path / "one"), items(tmp_path / "two")]
    assert len(found[1]) > len(lines)
    one, two = ([item for item in each if len(item) > 1] for each in found)
    assert one == two


def test_compressed_files_are_read_one_after_the_other(tmp_path):
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, "": open}
    paths = [tmp_path / f"text{number}{suffix}" for number, suffix in enumerate(openers)]
    for number, (path, opener) in enumerate(zip(paths, openers.values())):
        with opener(path, "wb") as file:
            file.write(f"w{number} w{number + 1}\n".encode() * 5)
    run("--train", *paths, "--out", tmp_path / "all")
    assert len(items(tmp_path / "all")) == 4 * 5 + 3  # an empty item between files


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_named(tmp_path, damage):
    data = bytearray(gzip.compress(make_text(tmp_path / "plain").read_bytes()))
    data = data[:-20] if damage == "cut" else data[:200] + b"\xff\xff\xff" + data[203:]
    path = tmp_path / "text.gz"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path} is damaged"):
        run("--train", path, "--out", tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_chunks_are_whole_lines_wherever_reading_begins(tmp_path, block, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", block)
    data = b"a\r\nb\n\nc\rd\n\r\nlast"
    (tmp_path / "text").write_bytes(data)
    source = sources.read_source(str(tmp_path / "text"))
    *chunks, (last, rest) = sources.read_chunks([source])
    assert (last.ends_file, rest) == (True, b"")
    texts = [text for _, text in chunks]
    assert b"".join(texts) == data
    assert all(text.endswith(b"\n") for text in texts[:-1])
    with open(tmp_path / "text", encoding="utf-8") as file:
        assert last.lines_before == len(list(file))
    assert source.sha256 == hashlib.sha256(data).hexdigest()


def test_a_line_without_end_is_no_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "text").write_bytes(b"ok\n" + bytes(3 << 20))
    with pytest.raises(UserError, match=r"text: a line has more than 1 MiB; is this a text"):
        run("--train", tmp_path / "text", "--out", tmp_path / "bin")


def test_a_killed_worker_is_shown_in_one_line(tmp_path, text, monkeypatch):
    monkeypatch.setattr(command, "make_items", lambda *_, **k: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="a worker process was killed, often"):
        run("--train", text, "--out", tmp_path / "bin")


def test_few_chunks_are_in_memory(tmp_path):
    read = []

    def chunks():
        for number in range(200):
            read.append(number)
            yield number, b""

    for mark, result in pool.map_chunks(chunks(), 2, len):
        assert result == 0
        assert len(read) - mark <= 2 * pool.PENDING_PER_WORKER


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
    expected = {"path": str(text), "lines": number}
    assert source == {**expected, "sha256": hashlib.sha256(data).hexdigest()}
    found = items(tmp_path / "bin")
    assert train["counts"]["items"] == len(found)
    assert train["counts"]["tokens"] == sum(map(len, found))
    assert train["counts"]["lines"] == number
    assert train["counts"]["unknown_tokens"] == 0
    dictionary = (tmp_path / "bin" / "dict.txt").read_bytes()
    assert manifest["dict.txt"]["sha256"] == hashlib.sha256(dictionary).hexdigest()
    assert set(content(tmp_path / "bin")) == {*FILES, "manifest.json", "request.json"}


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


def test_two_runs_do_not_write_the_same_folder(tmp_path, text):
    message = rf"bin.partial: process {os.getpid()} on .* is running there"
    with folders.lock_folder(tmp_path / "bin.partial"), pytest.raises(UserError, match=message):
        run("--train", text, "--out", tmp_path / "bin")
    run("--train", text, "--out", tmp_path / "bin")


@pytest.mark.slow
def test_a_killed_run_keeps_its_finished_parts_and_ends_with_the_same_bytes(tmp_path):
    for number in range(3):
        make_text(tmp_path / "text" / str(number), 4000, number)
    words = ["--train", tmp_path / "text", "--words", "--workers", 1, "--out"]
    start("plain_text", *words, tmp_path / "whole")
    manifest = tmp_path / "killed.partial" / "manifest.json"

    def has_finished_a_part() -> bool:
        return manifest.exists() and '"lines"' in manifest.read_text()

    given = ["preprocess", "plain_text", *words, tmp_path / "killed"]
    kill_command(given, has_finished_a_part, manifest.parent, env=true_start())
    finished = json.loads(manifest.read_text())["splits"]["train"]["inputs"]
    read = []
    with pytest.MonkeyPatch.context() as patch:
        original = sources._read_lines
        patch.setattr(sources, "_read_lines", lambda path: (read.append(path), original(path))[1])
        start("plain_text", *words, tmp_path / "killed")
    assert read == [str(tmp_path / "text" / str(number)) for number in range(3)][len(finished) :]
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
