"""Where commands write: full disks and the terminal.

What a full disk leaves, and what a terminal would obey, are found nowhere else.
"""

from __future__ import annotations

import errno
import re
import shutil

import pytest

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.progress import say
from tests.helpers.commands import EPOCHS, refused, train, trained
from tests.workbench.reports.test_curves import write

FULL = {  # commands and what they write
    "plot png": ("plot table --encoding learned", "out.png"),
    "plot svg": ("plot table --encoding learned", "out.svg"),
    "inspect": ("inspect --checkpoint last.pt --text w1", "out.html"),
    "export": ("export --checkpoint last.pt --tokens words", "out"),
    "learning-curves": ("learning-curves a=train.log", "out"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), FULL.values(), ids=FULL)
def test_a_full_disk_is_a_line_and_no_file(command, name, mount, tmp_path, monkeypatch, capsys):
    disk = mount("16k")
    (disk / "other-files").write_bytes(bytes(12_288))  # one block is left: a page of the system
    write(tmp_path / "train.log", 8, 7)
    (tmp_path / "last.pt").symlink_to(trained("causal_lm").save_dir / "checkpoint_last.pt")
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *command.split(), "--out", disk / name, code=1)
    assert "could not be written (No space left on device)" in message
    assert message.startswith(f"{disk}/out")
    assert [path.name for path in disk.rglob("*")] == ["other-files"]


@pytest.mark.slow
def test_a_disk_without_room_leaves_the_previous_checkpoints_whole(mount):
    """fairseq copies a new checkpoint over the old ones in place; it must not come to that."""
    disk = mount("8m")
    shutil.copytree(trained("causal_lm").save_dir, disk, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in disk.glob("*.pt")}
    room = 0.6 * len(before["checkpoint_last.pt"])
    (disk / "other-files").write_bytes(bytes(int(shutil.disk_usage(disk).free - room)))
    done = train("causal_lm", "--max-epoch", EPOCHS + 1, save_dir=disk, fails=True).run
    assert {path.name: path.read_bytes() for path in disk.glob("*.pt")} == before
    assert done.error().startswith(f"no room for a checkpoint in {disk}: it needs about ")


LIMITS = {
    errno.ENAMETOOLONG: "a: the name is too long for a file",
    errno.EACCES: "a: denied; allow access, or name another place",
    errno.EMFILE: "a could not be opened: .*; run `ulimit -n 4096` first",
    errno.ENFILE: "a could not be opened: .*; close other programs",
}


@pytest.mark.parametrize(("code", "message"), LIMITS.items())
def test_limits_of_a_machine_are_a_line(code, message):
    assert re.fullmatch(message, find_message(OSError(code, "denied", "a")))


@pytest.mark.parametrize("text", ["\x1b[31m\x9b1m\a\b\x7f", "\r", "\u2028", "\u202e", "\ud800"])
def test_messages_write_control_characters_out(text, capsys):
    assert str(UserError(text)).isprintable()
    assert find_message(OSError(errno.ENOSPC, "", text)).isprintable()
    say(text)
    assert capsys.readouterr().err.removesuffix("\n").isprintable()
