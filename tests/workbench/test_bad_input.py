"""Trainings that are over, torn or without room: they go on or end with a line, and lose nothing.

Whole commands of fairseq; what is refused at a start is in ``tests/host/test_late_options.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import (
    EPOCHS,
    Training,
    train,
    trained,
    validate,
)

pytestmark = pytest.mark.slow
RESET = ["--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader"]


def copy_of_trained(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of the shared language model."""
    return Path(shutil.copytree(trained("causal_lm").save_dir, tmp_path / "checkpoints"))


def test_the_command_of_a_training_killed_while_it_copied_goes_on(tmp_path):
    save_dir = copy_of_trained(tmp_path)
    last = save_dir / "checkpoint_last.pt"
    last.write_bytes(last.read_bytes()[:9999])
    done = train("causal_lm", "--max-epoch", EPOCHS + 1, save_dir=save_dir)
    assert f"{last} was not written to its end; training resumes from " in done.run.log
    assert done.checkpoint()["optimizer_history"][-1]["num_updates"] == EPOCHS + 1
    assert len(whole_checkpoints(save_dir)) == EPOCHS + 3


def test_a_finished_training_changes_nothing(tmp_path):
    save_dir = copy_of_trained(tmp_path)
    before = {path.name: path.read_bytes() for path in save_dir.glob("*.pt")}
    done = train("causal_lm", "--max-update", EPOCHS, save_dir=save_dir).run
    told = f"checkpoint_last.pt has made {EPOCHS} updates of --max-update {EPOCHS}"
    assert f"{told}: the training is finished, and nothing was changed" in done.log
    assert {path.name: path.read_bytes() for path in save_dir.glob("*.pt")} == before
    other = ["--restore-file", save_dir / "checkpoint_last.pt", "--max-update", EPOCHS - 1]
    done = train("causal_lm", *other, fails=True).run
    assert "nothing is left to train" in done.error()


@pytest.fixture(scope="module")
def stock():
    """fairseq's own RoBERTa, of the size of roberta_*_tiny."""
    size = ["--encoder-layers", 2, "--encoder-embed-dim", 128, "--encoder-ffn-embed-dim", 512]
    size += ["--encoder-attention-heads", 4, "--max-positions", 16]
    return train("masked_lm", "--arch", "roberta", *size, "--max-epoch", 2, user_dir=None)


def restored(stock: Training, *options, **how) -> Training:
    """Restore fairseq's model into one of ours, and validate it: at a rate of 0 nothing changes."""
    path = stock.save_dir / "checkpoint_last.pt"
    unchanged = ["--lr", 0, "--max-epoch", 1]
    return train("masked_lm", "--restore-file", path, *RESET, *unchanged, *options, **how)


def test_a_stock_checkpoint_in_roberta_learned_has_the_stock_loss(stock):
    ours = restored(stock, "--arch", "roberta_learned_tiny")
    assert ours.figures("valid") == pytest.approx(stock.figures("valid")[-1:], rel=1e-5)
    # fairseq's own model; the package only lets torch load the checkpoint.
    done = validate("masked_lm", stock.save_dir / "checkpoint_last.pt")
    assert done.positions() == []
    assert done.valid() == ours.run.valid()


def whole_checkpoints(directory: Path) -> dict[str, int]:
    """Return the updates of every checkpoint in a directory; fails if one cannot be loaded."""
    states = {path.name: torch.load(path) for path in directory.glob("*.pt")}
    return {name: state["optimizer_history"][-1]["num_updates"] for name, state in states.items()}


def test_a_disk_without_room_leaves_the_previous_checkpoints_whole(mount):
    """fairseq copies a new checkpoint over the old ones in place; it must not come to that."""
    disk = mount("8m")
    saved = trained("causal_lm").save_dir
    for path in saved.glob("*.pt"):
        shutil.copy(path, disk)
    size = (saved / "checkpoint_last.pt").stat().st_size
    before = whole_checkpoints(disk)
    space = shutil.disk_usage(disk).free
    (disk / "other-files").write_bytes(bytes(int(space - 0.6 * size)))
    done = train("causal_lm", "--max-epoch", EPOCHS + 1, save_dir=disk, fails=True).run
    assert whole_checkpoints(disk) == before
    assert done.error().startswith(f"no room for a checkpoint in {disk}: it needs about ")
