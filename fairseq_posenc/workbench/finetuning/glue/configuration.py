"""Composes the YAML files of ``finetune_configs/glue`` as ``fairseq-hydra-train`` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.dataclass.initialize import hydra_init
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import Task
from fairseq_posenc.workbench.running.files import shipped
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes.composing import compose_file
from fairseq_posenc.workbench.training.recipes.layouts import config_name

CONFIGS = shipped("finetune_configs") / "glue"


class Settings(NamedTuple):
    """Settings of a task's configuration.

    Attributes:
        name: name of the configuration.
        metric: metric that chooses the checkpoint, and is reported.
        max_update: number of updates.
        warmup_updates: updates in which the learning rate grows.
        model: model options in the file: hydra changes them, and adds all others with ``+``.
    """

    name: str
    metric: str
    max_update: int
    warmup_updates: int
    model: frozenset[str]


class Grid(NamedTuple):
    """The learning rates and seeds of a task's runs."""

    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]


def paper_grid(protocol: str, task: Task) -> Grid:
    """Look up the learning rates and seeds of the paper."""
    recipe = _recipe(protocol)
    given = {**recipe["not_given"], **recipe["settings"]}
    given.update(recipe.get("per_task", {}).get(task.name, {}))
    return Grid(tuple(given["lr"]), tuple(given["seeds"]))


def read_settings(
    configs: Path, protocol: str, task: Task, examples: int, overrides: Sequence[str]
) -> Settings:
    """Compose a task's configuration, with the updates that depend on the data.

    Args:
        configs: folder of the YAML files.
        protocol: name of the protocol.
        task: the task.
        examples: size of its training set.
        overrides: the user's hydra overrides.

    Raises:
        UserError: the file is not there, or hydra refuses it or an override.
    """
    name = config_name(protocol, task)
    cfg = _compose(configs, name, overrides)
    # Where the YAML file leaves them open, they depend on the data.
    max_update = cfg.optimization.max_update or (
        cfg.optimization.max_epoch * _updates_per_epoch(cfg, examples)
    )
    warmup = cfg.lr_scheduler.warmup_updates or round(
        _recipe(protocol)["not_given"].get("warmup_ratio", 0) * max_update
    )
    written = _compose(configs, name, []) if overrides else cfg
    model = frozenset(written.get("model") or {})
    metric = cfg.checkpoint.best_checkpoint_metric
    return Settings(name, metric, int(max_update), int(warmup), model)


def _recipe(protocol: str) -> dict[str, Any]:
    recipe: dict[str, Any] = recipes.load()["finetuning"]["glue"][protocol]
    return recipe


def _updates_per_epoch(cfg: Any, examples: int) -> int:
    batches = math.ceil(examples / cfg.dataset.batch_size)
    on_each = math.ceil(batches / cfg.distributed_training.distributed_world_size)
    return math.ceil(on_each / cfg.optimization.update_freq[0])


def _compose(configs: Path, name: str, overrides: Sequence[str]) -> Any:
    if not (configs / f"{name}.yaml").is_file():
        raise UserError(
            f"{configs / name}.yaml is not there: name the folder of your YAML files with --configs"
        )
    hydra_init(name)
    try:
        return compose_file(configs / f"{name}.yaml", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{configs / name}.yaml: {' '.join(str(error).split())}") from error
