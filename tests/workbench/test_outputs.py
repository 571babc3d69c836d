"""Where commands write: odd names, full disks and the terminal.

What a full disk leaves, and what a terminal would obey, are found nowhere else.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.running.progress import say
from tests.helpers.commands import EPOCHS, refused, train, trained
from tests.workbench.reports.test_curves import write


def test_a_name_that_begins_with_a_dash_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "table", "--encoding", "learned", "--out=-a.png"]) == 0
    assert os.listdir() == ["-a.png"]


FULL = {  # commands and what they write
    "plot png": ("plot table --encoding learned", "out.png"),
    "plot svg": ("plot table --encoding learned", "out.svg"),
    "inspect": ("inspect --checkpoint last.pt --text w1", "out.html"),
    "export": ("export --checkpoint last.pt --tokens words", "out"),
    "learning-curves": ("learning-curves a=train.log", "out"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), FULL.values(), ids=FULL)
def test_a_full_disk_is_a_line_and_leaves_nothing(
    command, name, mount, tmp_path, monkeypatch, capsys
):
    disk = mount("16k")
    (disk / "other-files").write_bytes(bytes(12_288))  # one block is left: a page of the system
    write(tmp_path / "train.log", 8, 7)
    (tmp_path / "last.pt").symlink_to(trained("causal_lm").save_dir / "checkpoint_last.pt")
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *command.split(), "--out", disk / name, code=1)
    assert "could not be written (No space left on device)" in message
    assert message.startswith(f"{disk}/out")
    left = {path.name for path in disk.iterdir()} - {"other-files"}
    assert left == {"out"} if command.startswith("learning-curves") else not left
    assert not list(disk.rglob("*.posenc-*"))


def whole_checkpoints(directory: Path) -> dict[str, int]:
    """Return the updates of every checkpoint in a directory; fails if one cannot be loaded."""
    states = {path.name: torch.load(path) for path in directory.glob("*.pt")}
    return {name: state["optimizer_history"][-1]["num_updates"] for name, state in states.items()}


@pytest.mark.slow
def test_a_disk_without_room_leaves_the_previous_checkpoints_whole(mount):
    """fairseq copies a new checkpoint over the old ones in place; it must not come to that."""
    disk = mount("8m")
    saved = trained("causal_lm").save_dir
    for path in saved.glob("*.pt"):
        shutil.copy(path, disk)
    size = (saved / "checkpoint_last.pt").stat().st_size
    before = whole_checkpoints(disk)
    (disk / "other-files").write_bytes(bytes(int(shutil.disk_usage(disk).free - 0.6 * size)))
    done = train("causal_lm", "--max-epoch", EPOCHS + 1, save_dir=disk, fails=True).run
    assert whole_checkpoints(disk) == before
    assert done.error().startswith(f"no room for a checkpoint in {disk}: it needs about ")


TEXT = "a\x1b[31mb\x9b1mc\x07d\x08e\x7ff"


@pytest.mark.parametrize("text", [TEXT, "a\rb", "a\u2028b", "a\u202eb", "a\ud800b"])
def test_messages_write_control_characters_out(text, capsys):
    assert str(UserError(text)).isprintable()
    assert find_message(OSError(errno.ENOSPC, "", text)).isprintable()
    say(text)
    assert capsys.readouterr().err.removesuffix("\n").isprintable()
