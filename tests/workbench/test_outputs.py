"""Where commands write: odd names, full disks and the terminal.

What a full disk leaves, and what a terminal would obey, are found nowhere else.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.running.progress import say
from tests.helpers.commands import EPOCHS, refused, train, trained


@pytest.mark.parametrize("words", ["--out=-a.png", "--out ./-a.png"])
def test_a_name_that_begins_with_a_dash_can_be_written(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "table", "--encoding", "learned", *words.split()]) == 0
    assert os.listdir(tmp_path) == ["-a.png"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "plot table --encoding learned --out out.png",
        "plot table --encoding learned --out out.svg",
        "inspect --checkpoint CHECKPOINT --text w1 --out out.html",
        "export --checkpoint CHECKPOINT --tokens words --out out",
        "learning-curves a=LOG --out out",
    ],
)
def test_a_full_disk_is_a_line_and_leaves_nothing(command, tmp_path, mount, capsys):
    log, checkpoint = tmp_path / "LOG", trained("causal_lm").save_dir / "checkpoint_last.pt"
    log.write_text('| valid | {"valid_loss": "2", "valid_num_updates": "1"}\n')
    command = command.replace("CHECKPOINT", str(checkpoint)).replace("LOG", str(log))
    small_disk = mount("16k")
    (small_disk / "others").write_bytes(bytes(16_384 - 8192))
    (small_disk / "more").write_bytes(bytes(4096))  # one block is left: a page of the system
    *words, name = command.split()
    message = refused(capsys, *words, small_disk / name, code=1)
    assert "could not be written (No space left on device)" in message
    assert message.startswith(f"{small_disk}/out")
    left = [path.name for path in small_disk.iterdir() if path.name not in ("others", "more")]
    assert left == ["out"] * (words[0] == "learning-curves")
    assert not list(small_disk.rglob("*.posenc-*"))


@pytest.mark.slow
def test_a_disk_without_room_leaves_the_previous_checkpoints_whole(mount):
    """fairseq copies a new checkpoint over the old ones in place; it must not come to that."""
    disk = mount("8m")
    saved = trained("causal_lm").save_dir
    for path in saved.glob("*.pt"):
        shutil.copy(path, disk)

    def read_updates() -> dict[str, int]:
        """Load every checkpoint; return their updates."""
        found = {path.name: torch.load(path)["optimizer_history"] for path in disk.glob("*.pt")}
        return {name: history[-1]["num_updates"] for name, history in found.items()}

    before = read_updates()
    room = shutil.disk_usage(disk).free - 0.6 * (saved / "checkpoint_last.pt").stat().st_size
    Path(disk / "other-files").write_bytes(bytes(int(room)))
    done = train("causal_lm", "--max-epoch", EPOCHS + 1, save_dir=disk, fails=True).run
    assert read_updates() == before
    assert done.error().startswith(f"no room for a checkpoint in {disk}: it needs about ")


def test_messages_write_control_characters_out(capsys):
    for text in ("a\x1b[31mb\x9b1mc\x07d\x08e\x7ff", "a\rb", "a\u2028b", "a\u202eb", "a\ud800b"):
        assert str(UserError(text)).isprintable()
        say(text)
        assert capsys.readouterr().err.removesuffix("\n").isprintable()
        assert refused(capsys, text).isprintable()
