"""Fine-tunes on SQuAD with ``fairseq-hydra-train``, by the recipe of the data's version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import folders
from fairseq_posenc.checkpoints.recovery import ensure_last_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.squad.databin import SquadDataBin, open_data_bin
from fairseq_posenc.workbench.finetuning.recipes import build_overrides, compose_recipe, train
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained, read_pretrained
from fairseq_posenc.workbench.running.files import find_shipped_folder
from fairseq_posenc.workbench.running.progress import say

# In M4M's paper, encodings that diverged at the rate of the others, and the rate that they needed.
_DIVERGED = {"raffel", "tupe"}
_SMALLER_RATE = "optimization.lr=[2.5e-05]"


def find_recipe(data_bin: SquadDataBin) -> Path:
    """Find the recipe for the version of SQuAD of some data."""
    version = data_bin.version.replace(".", "")
    return find_shipped_folder("finetune_configs") / f"squad{version}.yaml"


def compose_training(
    pretrained: Pretrained,
    data_bin: SquadDataBin,
    out: Path,
    recipe: Path | None,
    changes: Sequence[str],
    gpus: int = 1,
) -> tuple[DictConfig, list[str]]:
    """Compose a training for a number of GPUs; return its configuration and hydra's arguments.

    Args:
        pretrained: the model to start from.
        data_bin: the data.
        out: folder of the results.
        recipe: the YAML file; None for that of the data's version.
        changes: the user's hydra overrides.
        gpus: number of GPUs, which share the batch of the recipe.

    Raises:
        UserError: the recipe or an override cannot be read, or sizes do not fit.
    """
    pretrained.check_dictionary(data_bin.dictionary)
    data_bin.check_lengths(pretrained.max_positions, pretrained.path)
    path = recipe or find_recipe(data_bin)
    if recipe is None and {item.name for item in pretrained.spec.items} & _DIVERGED:
        changes = [_SMALLER_RATE, *changes]
    cfg = compose_recipe(path, data_bin.train_windows, changes)
    if gpus > 1:
        changes = [*changes, *_share_batch(cfg, gpus)]
        cfg = compose_recipe(path, data_bin.train_windows, changes)
    values: dict[str, Any] = {
        "task.data": data_bin.path.resolve(),
        "checkpoint.save_dir": out.resolve(),
        "checkpoint.finetune_from_model": pretrained.path.resolve(),
    }
    words = build_overrides(path, cfg, pretrained, values, changes)
    return compose_recipe(path, data_bin.train_windows, words[2:]), words


def _share_batch(cfg: DictConfig, gpus: int) -> list[str]:
    """Divide the batch of the recipe, which is for one GPU, equally among several."""
    maximum = cfg.dataset.batch_size  # that fits the memory of a GPU
    batch = maximum * cfg.optimization.update_freq[0]
    shares = range(maximum, 0, -1)
    per_gpu = next((share for share in shares if batch % (gpus * share) == 0), None)
    if per_gpu is None:
        raise UserError(
            f"a batch of {batch} windows cannot be divided among {gpus} GPUs: select fewer with "
            "CUDA_VISIBLE_DEVICES"
        )
    return [
        f"distributed_training.distributed_world_size={gpus}",
        f"dataset.batch_size={per_gpu}",
        f"optimization.update_freq=[{batch // (gpus * per_gpu)}]",
    ]


def fine_tune(
    checkpoint: Path, data: Path, out: Path, recipe: Path | None, changes: Sequence[str]
) -> None:
    """Train, or continue, on all GPUs of this machine or its processor.

    Raises:
        UserError: wrong input, or the folder has something else.
        RunError: the training failed.
    """
    choices = read_pretrained(checkpoint, for_fairseq=True), open_data_bin(data), out, recipe
    # The request is for one GPU, so that any machine can resume the training.
    config, words = compose_training(*choices, changes)
    request = cast("dict[str, Any]", OmegaConf.to_container(config, enum_to_str=True))
    if (gpus := torch.cuda.device_count()) > 1:
        config, words = compose_training(*choices, changes, gpus)
    updates = config.optimization.max_update
    with folders.lock_folder(out) as lock:
        ensure_last_checkpoint(out)
        if (out / folders.REQUEST).exists() and not updates_done(out):
            folders.empty(out)  # it failed before its first checkpoint
        folders.claim(out, request)
        if updates_done(out) >= updates:
            say(f"{out}: the training is finished, and nothing was changed")
            return
        train(["fairseq-hydra-train", *words], out, lock, str(out), updates, "loss")
