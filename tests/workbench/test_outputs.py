"""Where commands write: links, pipes, devices, odd names, full disks, and the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.running.progress import say
from tests.helpers.commands import refused, trained

LOG = "".join(
    f'2024-01-01 00:00:00 | INFO | {kind} | {{"epoch": 1, "{name}loss": "{9 - update}", '
    f'"{name}ppl": "30", "{name}wps": "1000", "{name}num_updates": "{update}"}}\n'
    for update in range(1, 5)
    for kind, name in (("train_inner", ""), ("valid", "valid_"))
)
PLOT = ["plot", "table", "--encoding", "learned", "--out"]


def checkpoint() -> Path:
    return trained("causal_lm").save_dir / "checkpoint_last.pt"


# Commands that write a file, but for its name, and the suffix.
FILES: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "plot png": (lambda: PLOT, ".png"),
    "plot svg": (lambda: PLOT, ".svg"),
    "inspect": (
        lambda: ["inspect", "--checkpoint", checkpoint(), "--text", "w1 w2", "--out"],
        ".html",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "train.log").write_text(LOG, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


FOLDERS: dict[str, Callable[[], list[Any]]] = {
    "learning-curves": lambda: ["learning-curves", "a=../train.log"],
    "export": lambda: ["export", "--checkpoint", checkpoint(), "--tokens", "words"],
}


# ---------------------------------------------------------------------------- names with a dash


@pytest.mark.parametrize("words", [["--out=-a.png"], ["--out", "./-a.png"]])
def test_a_name_that_begins_with_a_dash_can_be_written(words, folder):
    assert main([*PLOT[:-1], *words]) == 0
    assert os.listdir(folder) == ["-a.png"]


# -------------------------------------------------------------------------------- full disks


FULL = {
    **{name: (command, f"out{suffix}") for name, (command, suffix) in FILES.items()},
    "export": (lambda: [*FOLDERS["export"](), "--out"], "out"),
    "learning-curves": (lambda: [*FOLDERS["learning-curves"](), "--out"], "out/curves.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), FULL.values(), ids=list(FULL))
def test_a_full_disk_is_a_line_and_leaves_nothing(command, name, folder, small_disk, capsys):
    (small_disk / "others").write_bytes(bytes(16_384 - 8192))
    (small_disk / "more").write_bytes(bytes(4096))  # one block is left: a page of the system
    out = small_disk / name
    folder_out = out.parent if out.parent != small_disk else out
    before = set(os.listdir(small_disk))
    told = refused(capsys, *command(), folder_out, code=1)
    assert "could not be written (No space left on device)" in told
    assert told.startswith(f"{small_disk}/out")
    left = set(os.listdir(small_disk)) - before
    assert left <= {"out"}
    assert not [path for path in small_disk.rglob("*.posenc-*")]
    assert not left or out.parent != small_disk


def program(*words: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    code = "import sys; from fairseq_posenc.workbench.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], check=False, **streams)


@pytest.fixture
def full() -> Iterator[Any]:
    with open("/dev/full", "wb") as file:
        yield file
        file.raw.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["list"], ["describe", "rope"], ["count", "--encoding", "rope"], ["user-dir"]]
)
def test_an_output_that_cannot_be_written_is_a_line(words, full):
    done = program(*words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert "could not be written (No space left on device)" in last
    assert b"Traceback" not in done.stderr


# ------------------------------------------------------------------------------------ terminals


TEXT = "a\x1b[31mb\x9b1mc\x07d\x08e\x7ff"


@pytest.mark.parametrize("text", [TEXT, "a\rb", "a\u2028b", "a\u202eb", "a\ud800b"])
def test_messages_write_control_characters_out(text, capsys):
    assert str(UserError(text)).isprintable()
    say(text)
    assert capsys.readouterr().err.removesuffix("\n").isprintable()
    assert refused(capsys, text).removesuffix("\n").isprintable()


# ------------------------------------------------------------------------------ file descriptors
