"""Fine-tunes on SQuAD with ``fairseq-hydra-train``, by the recipe of the data's version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import folders
from fairseq_posenc.checkpoints.recovery import ensure_last_checkpoint
from fairseq_posenc.tasks.squad.databin import SquadDataBin, open_data_bin
from fairseq_posenc.workbench.finetuning.recipes import (
    build_command,
    build_settings,
    compose_recipe,
    join_overrides,
    train,
)
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained, read_pretrained
from fairseq_posenc.workbench.running.files import find_shipped_folder
from fairseq_posenc.workbench.running.progress import say

# In M4M's paper, encodings that diverged at the rate of the others, and the rate that they needed.
_DIVERGED = {"raffel", "tupe"}
_SMALLER_RATE = "optimization.lr=[2.5e-05]"


def compose_training(
    pretrained: Pretrained, data_bin: SquadDataBin, out: Path, changes: Sequence[str]
) -> tuple[DictConfig, list[str]]:
    """Compose a training; return its configuration and its command.

    Args:
        pretrained: the model to start from.
        data_bin: the data.
        out: folder of the results.
        changes: the user's hydra overrides.

    Raises:
        UserError: an override cannot be read, or sizes do not fit.
    """
    pretrained.check_dictionary(data_bin.dictionary)
    data_bin.check_lengths(pretrained.max_positions, pretrained.path)
    version = data_bin.version.replace(".", "")
    path = find_shipped_folder("finetune_configs") / f"squad{version}.yaml"
    if {item.name for item in pretrained.spec.items} & _DIVERGED:
        changes = [_SMALLER_RATE, *changes]
    values = {"task.data": data_bin.path.resolve(), "checkpoint.save_dir": out.resolve()}
    settings = build_settings(pretrained, values, changes)
    cfg = compose_recipe(path, data_bin.train_windows, join_overrides(settings))
    settings["optimization.max_update"] = str(cfg.optimization.max_update)
    settings["lr_scheduler.warmup_updates"] = str(cfg.lr_scheduler.warmup_updates)
    return cfg, build_command(path, settings)


def fine_tune(checkpoint: Path, data: Path, out: Path, changes: Sequence[str]) -> None:
    """Train, or continue.

    Raises:
        UserError: wrong input, or the folder has something else.
        RunError: the training failed.
    """
    pretrained = read_pretrained(checkpoint)
    cfg, command = compose_training(pretrained, open_data_bin(data), out, changes)
    updates = cfg.optimization.max_update
    with folders.lock_folder(out) as lock:
        ensure_last_checkpoint(out)
        if (out / folders.REQUEST).exists() and not updates_done(out):
            folders.empty(out)  # it failed before its first checkpoint
        folders.claim(out, cast("dict[str, Any]", OmegaConf.to_container(cfg, enum_to_str=True)))
        if updates_done(out) >= updates:
            say(f"{out}: the training is finished, and nothing was changed")
        else:
            train(command, out, lock, str(out), updates, "loss")
