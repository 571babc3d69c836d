"""The configuration of a fine-tuning: the recipe, the model as it was pre-trained, and the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import recipes
from fairseq_posenc.errors import UserError
from fairseq_posenc.recipes.composing import compose_file
from fairseq_posenc.running.host import USER_DIR
from fairseq_posenc.running.pretrained import Pretrained
from fairseq_posenc.shipped import shipped
from fairseq_posenc.tasks.squad.databin import DataBin

WARM_UP = 0.06  # of all updates (RoBERTa, arXiv:1907.11692, table 10)
# Hydra would write a second one.
_ONE_LOG = {
    "job_logging": {"handlers": {"file": {"delay": True}}, "root": {"handlers": ["console"]}}
}


def recipe(data_bin: DataBin) -> Path:
    """Return the YAML file for a version of SQuAD."""
    return shipped("finetune_configs") / f"squad{data_bin.version.replace('.', '')}.yaml"


def configuration(
    pretrained: Pretrained,
    data_bin: DataBin,
    out: Path,
    yaml_file: Path,
    changes: Sequence[str] = (),
) -> DictConfig:
    """Return the whole configuration of a fine-tuning.

    Args:
        pretrained: gives the model section, but for what the recipe says itself.
        data_bin: gives the number of updates.
        out: folder of the results.
        yaml_file: the recipe.
        changes: ``key=value`` that override everything else.

    Raises:
        UserError: a recipe or a change that cannot be read, or sizes that do not fit.
    """
    gpus = torch.cuda.device_count()
    here: dict[str, Any] = {
        "common": {"user_dir": str(USER_DIR), **({} if gpus else {"cpu": True, "fp16": False})},
        "task": {"data": str(data_bin.path.resolve())},
        "checkpoint": {
            "save_dir": str(out.resolve()),
            "finetune_from_model": str(pretrained.path.resolve()),
        },
        "distributed_training": {"distributed_world_size": max(gpus, 1)},
        "hydra": {"run": {"dir": str(out.resolve())}, "output_subdir": None, **_ONE_LOG},
    }
    rates = recipes.load()["finetuning"]["squad"]["m4m"]["lr_of"]  # of those that diverged at 3e-5
    for name in {item.name for item in pretrained.spec.items}:
        if name in rates:
            here["optimization"] = {"lr": [rates[name]]}
    try:
        given = _read(changes)
        composed = compose_file(yaml_file)
        OmegaConf.set_struct(composed, False)
        config = OmegaConf.merge(composed, {"model": _left_open(composed, pretrained)}, here)
        if gpus > 1:
            _share_out(config, gpus)
        config = OmegaConf.merge(config, given)
        assert isinstance(config, DictConfig)
        _check_lengths(config, pretrained, data_bin)
        _count_updates(config, data_bin)
    except UserError:
        raise
    except Exception as error:  # yaml, omegaconf, and values of another type have many
        raise UserError(f"{yaml_file}, --set: {' '.join(str(error).split())}") from None
    return config


def _left_open(recipe: DictConfig, pretrained: Pretrained) -> dict[str, Any]:
    """Return the model's options of which the recipe says nothing."""
    said = recipe.get("model") or {}
    return {
        name: value
        for name, value in pretrained.options.items()
        if name not in said or OmegaConf.is_missing(said, name)
    }


def _read(changes: Sequence[str]) -> DictConfig:
    for change in changes:
        name, equals, _ = change.partition("=")
        if not (name.strip() and equals):
            raise UserError(f"--set {change}: write NAME=VALUE, as in optimization.lr=[2e-5]")
    return OmegaConf.from_dotlist(list(changes))


def _check_lengths(config: Any, pretrained: Pretrained, data_bin: DataBin) -> None:
    """Refuse windows that are longer than the model's positions reach."""
    if config.model.max_positions < data_bin.limits.max_length:
        raise UserError(
            f"{data_bin.path} has windows of {data_bin.limits.max_length} tokens, but "
            f"{pretrained.path} has {config.model.max_positions} positions: make the data with "
            f"--max-length {config.model.max_positions}"
        )


def _share_out(config: Any, gpus: int) -> None:
    """Share a batch of the recipe, made for one GPU, between several.

    Raises:
        UserError: it cannot be shared equally.
    """
    most = config.dataset.batch_size
    batch = most * config.optimization.update_freq[0]
    each = recipes.largest_share(batch, gpus, most)
    if each is None:
        raise UserError(
            f"a batch of {batch} windows cannot be shared by {gpus} GPUs: name some of them in "
            "CUDA_VISIBLE_DEVICES"
        )
    config.dataset.batch_size = each
    config.optimization.update_freq = [batch // (gpus * each)]


def _count_updates(config: Any, data_bin: DataBin) -> None:
    """Set the updates of all epochs and those of the warm-up, where they are not set."""
    optimization = config.optimization
    if OmegaConf.is_missing(optimization, "max_update"):
        if config.dataset.get("max_tokens"):
            raise UserError(
                "--set dataset.max_tokens: the updates are not known beforehand then; set "
                "optimization.max_update too"
            )
        steps = config.distributed_training.distributed_world_size * optimization.update_freq[0]
        batches = math.ceil(data_bin.train_windows / config.dataset.batch_size)
        optimization.max_update = math.ceil(batches / steps) * optimization.max_epoch
    if OmegaConf.is_missing(config.lr_scheduler, "warmup_updates"):
        config.lr_scheduler.warmup_updates = round(WARM_UP * optimization.max_update)
