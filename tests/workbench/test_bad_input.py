"""Wrong input, wrong files and a full disk: one clear line, and nothing is lost or run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import (
    EPOCHS,
    USER_DIR,
    Training,
    run,
    sentences,
    train,
    trained,
    validate,
)

pytestmark = pytest.mark.slow
RESET = ["--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader"]


# -------------------------------------------------------------------------------------- options

SPEC = "--position-encoding"
ODD = ["--encoder-embed-dim", 36, "--encoder-attention-heads", 4]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("causal_lm", [SPEC, "rotary"], "unknown position encoding 'rotary': "),
        ("masked_lm", [*ODD, SPEC, "rope"], "rope rotates pairs, but 1 of a head of size 9 is 9"),
        ("causal_lm", ["--restore-file", "typo.pt"], "--restore-file typo.pt is no file"),
    ],
    ids=["unknown encoding", "odd heads", "no checkpoint"],
)
def test_train_tells_a_wrong_option_in_one_line(family, options, message):
    assert train(family, *options, fails=True).run.error().startswith(message)


# ---------------------------------------------------------------------------------- checkpoints


def test_eval_lm_refuses_weights_that_are_not_numbers(tmp_path):
    state = trained("causal_lm").checkpoint()
    name = "decoder.layers.1.fc1.weight"
    state["model"][name][0, 0] = torch.nan
    torch.save(state, tmp_path / "nan.pt")
    told = f"{name} has 1 of {state['model'][name].numel():,} numbers that are NaN or infinite"
    options = ["--user-dir", USER_DIR, "--path", tmp_path / "nan.pt", "--tokens-per-sample", 16]
    done = run("fairseq-eval-lm", sentences(), *options, fails=True)
    assert done.error().endswith(told)


CONFIGURATION = """# @package _global_
common: {{user_dir: {user_dir}, cpu: true}}
task: {{_name: language_modeling, data: {data}}}
model: {{_name: transformer_lm_rope_tiny}}
criterion: cross_entropy
optimizer: {{_name: adam}}
optimization: {{lr: [0.001], max_update: 1}}
dataset: {{batch_size: 16, num_workers: 0}}
checkpoint: {{save_dir: {folder}, restore_file: {folder}/checkpoint_last.pt}}
"""


def test_a_checkpoint_to_restore_that_a_configuration_names_and_does_not_exist(tmp_path):
    text = CONFIGURATION.format(user_dir=USER_DIR, data=sentences(), folder=tmp_path)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    named = ["--config-dir", tmp_path, "--config-name", "mine"]
    done = run("fairseq-hydra-train", *named, cwd=tmp_path, fails=True)
    missing = tmp_path / "checkpoint_last.pt"
    assert f"error: --restore-file {missing} is no file" in done.err.splitlines()[-1]
    assert done.status == 1
    assert not missing.exists()


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


# -------------------------------------------------------------------------------------- full disk


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
